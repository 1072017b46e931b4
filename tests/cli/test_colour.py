"""Colours that can be read on dark and on light grounds. The program knows neither the ground nor the palette, so it uses bold
in the terminal's own colour and the two of the eight names that are readable everywhere."""

import re

import pytest
from command_line import ROOT

from kimisession.cli.show import STYLES

NAMES = ("red", "green", "yellow", "blue", "magenta", "cyan")
#: Ground, then those six, as each program ships them: xterm's resources, VS Code's terminal colours, GNOME Terminal's own
#: palette, Ethan Schoonover's Solarized.
PALETTES = {
    "xterm, dark": "000000 cd0000 00cd00 cdcd00 0000ee cd00cd 00cdcd",
    "xterm, light": "ffffff cd0000 00cd00 cdcd00 0000ee cd00cd 00cdcd",
    "VS Code, dark": "1e1e1e cd3131 0dbc79 e5e510 2472c8 bc3fbc 11a8cd",
    "VS Code, light": "ffffff cd3131 00bc00 949800 0451a5 bc05bc 0598bc",
    "GNOME, dark": "171421 c01c28 26a269 a2734c 12488b a347ba 2aa1b3",
    "GNOME, light": "ffffff c01c28 26a269 a2734c 12488b a347ba 2aa1b3",
    "Solarized, dark": "002b36 dc322f 859900 b58900 268bd2 d33682 2aa198",
    "Solarized, light": "fdf6e3 dc322f 859900 b58900 268bd2 d33682 2aa198",
}
#: WCAG 2.2 asks 3:1 of bold text of a terminal's usual size and up; GNOME's red on its dark ground has 2.97.
ENOUGH = 2.9


def luminance(colour: str) -> float:
    """WCAG's relative luminance of six hex digits."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio, from 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def worst(name: str) -> float:
    """The lowest contrast that a colour has on any of these grounds."""
    found = []
    for palette in PALETTES.values():
        ground, *colours = palette.split()
        found.append(contrast(ground, colours[NAMES.index(name)]))
    return min(found)


def colours_of(style: str) -> list[str]:
    """Names of the colours that a style sets; anything else that it sets has to be bold."""
    codes = [int(code) for code in style.split(";")]
    assert all(code == 1 or 31 <= code <= 36 for code in codes), "no white, black, bright, background or dim"
    return [NAMES[code - 31] for code in codes if code != 1]


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_every_style_can_be_read_on_dark_and_on_light_grounds(style: str) -> None:
    for colour in colours_of(style):
        assert worst(colour) >= ENOUGH, colour


def test_the_colours_that_are_not_used_are_those_that_vanish_somewhere() -> None:
    used = {colour for style in STYLES.values() for colour in colours_of(style)}
    assert {name for name in NAMES if worst(name) >= ENOUGH} == used


def test_nothing_of_ours_colours_text_but_through_those_styles() -> None:
    """No escape that sets a colour stands anywhere else in the package, and no other library colours for us."""
    for path in (ROOT / "kimisession").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\\x1b\[[0-9;]*m|\\033\[[0-9;]*m", text) or path.name == "show.py", path
        assert not re.search(r"^\s*(from|import) rich\b|typer\.(secho|style)", text, re.MULTILINE), path
