"""`kimisession test`: does it answer, and like itself?"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from kimisession.endpoint.client import ENOUGH_TOKENS, Answer, ask

#: Short, medium, long: the kinds of question that the public write-up of February 2026 timed.
PROMPTS = (
    ("arithmetic", "What is 84 * 3 / 2? Answer with the number."),
    ("code", "Write a Python function that merges two sorted lists."),
    ("explanation", "Explain in five sentences why a mixture of experts is cheaper to run than a dense model."),
)


@dataclass(frozen=True)
class Check:
    """One question, its answer and how long it took in seconds."""

    name: str
    prompt: str
    answer: Answer
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens over the whole request, prefill included."""
        return self.answer.completion_tokens / self.seconds if self.seconds else 0.0


def run_checks(
    http: httpx.Client, model: str, max_tokens: int = ENOUGH_TOKENS, clock: Callable[[], float] = time.monotonic
) -> Iterator[Check]:
    """Ask each prompt once, in turn. Raises EngineFailed at the first that is not answered."""
    for name, prompt in PROMPTS:
        began = clock()
        answer = ask(http, model, prompt, max_tokens)
        yield Check(name, prompt, answer, clock() - began)
