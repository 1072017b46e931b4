"""`kimisession test`: does it answer, and like itself? The asking is `kimisession.node.inference`, which also runs alone."""

from collections.abc import Iterator

from kimisession.errors import EngineFailed
from kimisession.node.inference import Check, Endpoint, NoAnswer
from kimisession.node.inference import run_checks as ask_each

#: A person waits for this; the benchmark is more patient.
SILENT_S = 120.0


def run_checks(base_url: str, key: str, model: str, max_tokens: int) -> Iterator[Check]:
    """Ask each test prompt once, in turn. Raises EngineFailed at the first that is not answered."""
    try:
        yield from ask_each(Endpoint(base_url, key, SILENT_S), model, max_tokens)
    except NoAnswer as error:
        raise EngineFailed(str(error), "kimisession status shows what it is doing, kimisession logs its log") from None
