"""`status`, `connect`, `logs`, `test`: looking at sessions and talking to them."""

import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator
from datetime import datetime

from kimisession.cli import show
from kimisession.cli.opening import BEYOND, after_the_end, open_controller, pick, pick_live, pick_ready
from kimisession.cli.sessions import (
    REASONS,
    began_at,
    ended_at,
    ends_text,
    page,
    phase_now,
    seconds_since,
    spent,
    summary,
    utc_now,
)
from kimisession.core.cost import UNPRICED, cents
from kimisession.core.ledger import Session, State
from kimisession.core.lifecycle import Observation
from kimisession.errors import KimiError, LeakSuspected, UsageMistake
from kimisession.node.policy import span


def run_status(name: str | None, watch: bool, everything: bool, json: bool) -> None:
    """One row a session, or the page of one."""
    controller = open_controller()
    if watch:
        from kimisession.cli.watching import watch as follow

        follow(controller, pick(controller, name), json)
        return
    if name is not None:
        found = [pick_live(controller, name)]
    else:
        found = controller.live()
        if everything:
            live = {session.id for session, _ in found}
            rest = [controller.store.session(row.session) for row in controller.store.rows() if row.session not in live]
            found += [(session, Observation(utc_now(), None)) for session in rest]
    now = utc_now()
    if json:
        show.as_json("sessions", [summary(session, seen, now) for session, seen in found])
    elif name is not None:
        show.out(show.paint(found[0][0].name, "bold", sys.stdout))
        show.pairs(page(*found[0], now))
        show.next_step(*_next_of(found[0][0]))
    elif not found:
        show.out("no session is running")
        show.next_step("kimisession start", "kimisession status --all", BEYOND)
    else:
        show.table(HEAD, [row(*pair, now) for pair in found], FIGURES)
        running = [session for session, _ in found if session.live]
        for session, seen in found:
            warn_of_layers(session, seen)
        if running:
            name = running[0].name if len(running) == 1 else "NAME"
            show.next_step(*(f"kimisession {word} {name}" for word in ("status", "connect", "stop")))
        else:
            show.next_step("kimisession cost NAME", "kimisession start")
    for text in controller.store.damaged():
        show.warn("damaged", text)
    raise_if_loud([session for session, _ in found])


def raise_if_loud(sessions: list[Session]) -> None:
    """What cannot be confirmed stays loud in every command."""
    loud = [s for s in sessions if s.state is State.UNCONFIRMED]
    if loud:
        names = ", ".join(s.name for s in loud)
        raise LeakSuspected(
            f"not proven gone: {names}: {loud[0].unconfirmed}", f"kimisession stop {loud[0].name} tries again"
        )


#: The columns of `status`, and those of them that hold figures.
HEAD = ("NAME", "STATE", "UP", "SPENT", "$/H", "NEXT END")
FIGURES = frozenset({2, 3, 4})


def row(session: Session, seen: Observation, now: datetime) -> tuple[str, ...]:
    """One session in the list; of one that is gone the last column says why it ended."""
    began = began_at(session)
    up = span(seconds_since(began, ended_at(session) or now)) if began else "-"
    priced = session.request is not None and session.request.price_ground != UNPRICED
    price = cents(session.request.usd_per_hour) if session.request and priced else "?"
    state = phase_now(session, seen).partition(" (")[0] if session.live else session.state.value
    took = cents(spent(session, now)) if session.request else "?"
    return session.name, state, up, took, price, _last_column(session, seen, now)


def _last_column(session: Session, seen: Observation, now: datetime) -> str:
    if not session.live:
        return f"ended: {REASONS.get(session.reason, session.reason)}"
    if session.unconfirmed:
        return f"not proven gone: {session.unconfirmed}"
    if seen.present is None:
        return f"cannot be seen now: {seen.why}"
    return ends_text(session, seen, now).partition(", ")[0]


def warn_of_layers(session: Session, seen: Observation) -> None:
    """A layer that died since the start is said in the list too: nobody opens the page of what seems to be well. Before a
    session is ready its layers are still being read back."""
    for layer in seen.layers if session.state is State.READY else ():
        if not layer.armed:
            show.warn("not armed:", f"{session.name}: {layer.name}: {layer.evidence}")


def _next_of(session: Session) -> tuple[str, ...]:
    if not session.live:
        return (after_the_end(session),)
    if session.state is State.READY:
        words = ("connect", "test", "stop")
        return tuple(f"kimisession {word} {session.name}" for word in words)
    return f"kimisession status {session.name} --watch", f"kimisession stop {session.name}"


def run_connect(name: str | None, export: bool, thinking: bool, json: bool) -> None:
    """Base URL, key and lines to copy. The key is printed because it was asked for; it is in no log."""
    controller = open_controller()
    session, request = pick_ready(controller, name)
    base = controller.engines(request.infra).base_url(session.id, request.port) + "/v1"
    key, model = controller.key_of(session), request.served_name
    if json:
        show.as_json("endpoint", {"base_url": base, "api_key": key, "model": model})
    elif export:
        for variable, value in (("OPENAI_BASE_URL", base), ("OPENAI_API_KEY", key), ("OPENAI_MODEL", model)):
            show.out(f"export {variable}={shlex.quote(value)}")
    else:
        off = "" if thinking else ', "chat_template_kwargs": {"thinking": false}'
        extra = "" if thinking else '; create(..., extra_body={"chat_template_kwargs": {"thinking": False}})'
        body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 1024{off}}}'
        lines = show.pair_lines(
            [
                ("base URL", base),
                ("API key", key),
                ("model", model),
                ("shell", f'eval "$(kimisession connect {session.name} --export)"'),
                (
                    "curl",
                    f"curl {base}/chat/completions -H 'Content-Type: application/json' \\\n"
                    f"  -H \"Authorization: Bearer $OPENAI_API_KEY\" -d '{body}'",
                ),
                ("Python", f"from openai import OpenAI; client = OpenAI(){extra}  # reads the exports"),
            ],
            0,
        )
        show.out("\n".join(lines))  # as they are on any terminal: they are there to be copied
        show.next_step(f"kimisession test {session.name}")


def run_logs(name: str | None, follow: bool, run: int | None, folded: bool) -> None:
    """The engine's log."""
    controller = open_controller()
    session = pick(controller, name, gone_too=True)
    if session.request is None:
        raise KimiError(f"the ledger has lost what session {session.id} was", "kimisession status --all")
    if run is not None and run > session.run:
        had = {1: "was started once", 2: "was started twice"}.get(session.run, f"was started {session.run} times")
        raise UsageMistake(
            f"--run: the engine of {session.name} {had}, so there is no log of start {run}",
            f"kimisession logs {session.name} --run {session.run}",
        )
    try:
        lines = controller.engines(session.request.infra).logs(session.id, follow, run)
        for line in fold_phases(session.request.profile, lines) if folded else lines:
            show.out(line)
    except KeyboardInterrupt:
        sys.exit(130)


def fold_phases(profile: str, lines: Iterable[str]) -> Iterator[str]:
    """A log with the progress of each phase folded into one line; what is no progress stays as it is."""
    from kimisession.node.phases import log_reader
    from kimisession.profile_file import load_profile

    reader, phase = log_reader(load_profile(profile).engine.kind), ""
    for line in lines:
        mark = reader.read(line)
        if mark is None or mark.phase != phase or mark.facts:
            yield f"-- {mark.phase} --\n{line}" if mark and mark.phase != phase else line
        phase = mark.phase if mark else phase


def run_test(name: str | None, max_tokens: int, json: bool) -> None:
    """Three questions; null content is "still thinking"."""
    from kimisession.endpoint.check import run_checks

    controller = open_controller()
    session, request = pick_ready(controller, name)
    base = controller.engines(request.infra).base_url(session.id, request.port)
    rows, data = [], []
    for check in run_checks(base, controller.key_of(session), request.served_name, max_tokens):
        answer, rate = check.answer, check.tokens_per_second
        text = "still thinking when its tokens ran out" if answer.content is None else answer.content
        rows.append(
            (
                check.name,
                f"{check.seconds:.2f}",
                str(answer.completion_tokens),
                "-" if rate is None else f"{rate:.0f}",
                textwrap.shorten(text, 90, placeholder=" ..."),
            )
        )
        data.append(
            {
                "name": check.name,
                "seconds": round(check.seconds, 3),
                "completion_tokens": answer.completion_tokens,
                "still_thinking": answer.still_thinking,
                "content": answer.content,
                "model": answer.model,
            }
        )
    if json:
        show.as_json("test", data)
        return
    show.out(f"{show.paint(request.served_name, 'bold', sys.stdout)}{no_model(session)}")
    show.table(("QUESTION", "SECONDS", "TOKENS", "TOK/S", "ANSWER"), rows, frozenset({1, 2, 3}))
    show.next_step(f"kimisession connect {session.name}", f"kimisession status {session.name} --watch")


def no_model(session: Session) -> str:
    """Says that no model was run, where none was."""
    return "  stand-in engine: no model was run" if session.request and session.request.stand_in else ""
