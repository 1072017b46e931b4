"""`kimisession help TOPIC`: less than a screen each, and true."""

import re
from pathlib import Path

import pytest
from command_line import Home

from kimisession.cli.topics import TOPICS
from kimisession.errors import KimiError
from kimisession.settings import DEFAULTS, KNOWN


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_less_than_a_screen_and_printed_as_it_stands(topic: str, tmp_path: Path) -> None:
    text = TOPICS[topic][1]
    assert text.isascii()
    assert len(text.splitlines()) < 24
    assert max(map(len, text.splitlines())) <= 80
    assert Home(tmp_path).type("help", topic).out == text + "\n"


def test_the_exit_codes_that_are_told_are_those_that_errors_have() -> None:
    def codes(kind: type[KimiError]) -> set[int]:
        return {kind.exit_code}.union(*map(codes, kind.__subclasses__()))

    told = {int(code) for code in re.findall(r"^  (\d+) ", TOPICS["exit-codes"][1], re.MULTILINE)}
    assert told == {0, *codes(KimiError)}


def test_without_a_topic_they_are_listed_and_an_unknown_one_is_a_mistake(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert [line.split()[0] for line in home.type("help").out.splitlines()] == list(TOPICS)
    said = home.type("help", "exit-code")
    assert (said.code, said.sentence) == (2, "there is no topic 'exit-code'")
    assert "did you mean exit-codes?" in said.hint


def test_what_settings_says_can_be_set() -> None:
    keys = set(re.findall(r"^  (\w+) = ", TOPICS["settings"][1], re.MULTILINE))
    assert keys
    assert keys <= set(KNOWN)
    assert set(DEFAULTS) <= set(KNOWN)
