"""What the stand-in engine answers: a fixed text that says so, cut into tokens. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

THOUGHT = "Nothing is being thought here: these tokens stand where a model's reasoning would be."
ANSWER = "This answer comes from kimisession's stand-in engine; no model was run."

REASONING, CONTENT = "reasoning", "content"


@dataclass(frozen=True)
class Piece:
    """One token: its text, and the field it belongs to (REASONING or CONTENT)."""

    field: str
    text: str


@dataclass(frozen=True)
class Answer:
    """All the tokens that a request will get, known before the first one leaves."""

    prompt_tokens: int
    pieces: tuple[Piece, ...]
    finish_reason: str

    def text(self, field: str) -> str | None:
        """The text of one field; None, as in vLLM, where the answer ended before it began."""
        return "".join(piece.text for piece in self.pieces if piece.field == field) or None

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's usage object. completion_tokens is the number of deltas with text that a stream carries."""
        prompt, completion = self.prompt_tokens, len(self.pieces)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def tokens_of(text: str) -> list[str]:
    """Cut a text into the stand-in's tokens: words, each with the space before it."""
    return re.findall(r"\s*\S+", text)


def chat_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """All the text that a chat's messages carry, in order; content may be a string or a list of parts."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        texts += [part.get("text", "") for part in parts]
    return "\n".join(texts)


def prompt_text(prompt: str | Iterable[object]) -> str:
    """A completion's prompt as text; token ids count as a word each."""
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def plan_answer(body: Mapping[str, Any], *, chat: bool, max_model_len: int, reasoning_tokens: int) -> Answer:
    """Decide every token: in a chat that does not switch it off, reasoning first; then content.

    Honours max_tokens, max_completion_tokens, min_tokens, ignore_eos and chat_template_kwargs.thinking.
    ValueError, in one sentence, for what vLLM answers with 400: no room in the context, no tokens asked for, n > 1.
    """
    prompt_tokens = max(1, len(tokens_of(chat_text(body["messages"]) if chat else prompt_text(body["prompt"]))))
    room = max_model_len - prompt_tokens
    asked = body.get("max_completion_tokens") or body.get("max_tokens")
    if asked is None:
        asked = max(1, room) if chat else 16
    if not isinstance(asked, int) or asked < 1:
        raise ValueError(f"max_tokens must be at least 1, got {asked}.")
    if asked > room:
        raise ValueError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} "
            f"output tokens and your prompt contains {prompt_tokens} input tokens."
        )
    if (body.get("n") or 1) != 1:
        raise ValueError("The stand-in engine answers with n=1 only.")
    thinking = chat and (body.get("chat_template_kwargs") or {}).get("thinking", True) is not False
    thought = list(islice(_forever(THOUGHT), reasoning_tokens if thinking else 0))
    natural = max(len(thought) + len(tokens_of(ANSWER)), int(body.get("min_tokens") or 0))
    length = asked if body.get("ignore_eos") else min(asked, natural)
    tokens = chain((Piece(REASONING, text) for text in thought), (Piece(CONTENT, text) for text in _forever(ANSWER)))
    finish = "length" if body.get("ignore_eos") or length < natural else "stop"
    return Answer(prompt_tokens, tuple(islice(tokens, length)), finish)


def _forever(text: str) -> Iterator[str]:
    """The tokens of the text, again and again with a space between."""
    return chain(tokens_of(text), cycle(tokens_of(" " + text)))
