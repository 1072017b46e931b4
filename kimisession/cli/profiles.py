"""`kimisession profiles`."""

import sys
from dataclasses import asdict

from kimisession.cli import show
from kimisession.core.cost import cents
from kimisession.core.launch import flags_to_argv
from kimisession.core.profile import Profile
from kimisession.profile_file import load_profile, profile_files


def list_profiles(json: bool) -> None:
    """Two lines a profile, or three on a narrow terminal."""
    profiles = [load_profile(name) for name in sorted(profile_files())]
    if json:
        keys = ("name", "summary", "status")
        show.as_json("profiles", [{key: getattr(profile, key) for key in keys} for profile in profiles])
        return
    show.pairs([(p.name, f"{p.summary}\n{p.hardware.accelerators[0]}, {_price(p)}, {p.status}") for p in profiles])
    show.next_step("kimisession profiles NAME", "kimisession plan NAME", "kimisession start NAME")


def _price(profile: Profile) -> str:
    """Dollars an hour; a machine that nobody bills by the hour is told as such."""
    usd = profile.price.usd_per_hour
    return f"{cents(usd)}/h" + (" (pretended)" if profile.price.pretended else "") if usd else "no price by the hour"


def show_profile(name: str, json: bool) -> None:
    """One profile with the sources of its figures."""
    profile = load_profile(name)
    if json:
        show.as_json("profile", asdict(profile))
        return
    show.out(show.paint(profile.name, "bold", sys.stdout))
    rows = [
        ("what it is", profile.summary),
        ("status", profile.status),
        ("hardware", ", ".join(profile.hardware.accelerators) + f", on {profile.hardware.infra} by default"),
        ("engine", f"{profile.engine.kind} {profile.engine.version}"),
        ("flags", "\n".join(_in_pairs(flags_to_argv(profile.engine.flags))) or "none"),
    ]
    for c in profile.checkpoints:
        rows.append(
            (
                "checkpoint",
                f"{c.name}: {c.repo}, {show.size(c.bytes)}, {c.context:,} tokens, {', '.join(c.architectures)}",
            )
        )
        if c.flags:
            rows.append(("", " ".join(flags_to_argv(c.flags))))
        if c.note:
            rows.append(("", c.note))
    rows += [("price", _price(profile)), ("price from", profile.price.ground)]
    if profile.coldstart:
        low, high = profile.coldstart.minutes
        rows.append(("cold start", f"{low} to {high} minutes: {profile.coldstart.source}"))
    limits = profile.limits
    rows.append(("limits", f"idle {limits.idle}, hard cap {limits.duration}, at the longest {limits.longest}"))
    for fact in profile.provenance:
        rows.append((fact.verdict, f"{fact.claim}\n{fact.source}" + (f"\n{fact.note}" if fact.note else "")))
    show.pairs(rows)
    show.next_step(f"kimisession plan {name}", f"kimisession start {name}")


def _in_pairs(argv: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for arg in argv:
        if arg.startswith("--"):
            lines.append(arg)
        else:
            lines[-1] += f" {arg}"
    return lines
