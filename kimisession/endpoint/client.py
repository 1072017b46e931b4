"""One question to an OpenAI-compatible endpoint, and what came back."""

from dataclasses import dataclass
from typing import Any

import httpx

from kimisession.errors import EngineFailed

#: A reasoning model spends its first hundreds of tokens on thinking: with fewer than this, `content` is often null
#: (incident 10 of notes/incidents.md).
ENOUGH_TOKENS = 1024


@dataclass(frozen=True)
class Answer:
    """`content` is None while the model is still thinking when its tokens ran out: that is an answer, not an error."""

    content: str | None
    reasoning: str
    completion_tokens: int
    finish_reason: str
    model: str

    @property
    def still_thinking(self) -> bool:
        """The budget ended inside reasoning."""
        return self.content is None


def client(
    base_url: str, key: str, timeout_s: float = 120.0, transport: httpx.BaseTransport | None = None
) -> httpx.Client:
    """An HTTP client for one endpoint. `base_url` has no /v1."""
    headers = {"Authorization": f"Bearer {key}"}
    # Never through a proxy of the environment: the endpoint is on loopback, and the key must not leave it.
    return httpx.Client(base_url=base_url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False)


def ask(http: httpx.Client, model: str, prompt: str, max_tokens: int = ENOUGH_TOKENS, thinking: bool = True) -> Answer:
    """One chat completion. Raises EngineFailed, one sentence, for anything but an answer."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
    }
    if not thinking:
        body["chat_template_kwargs"] = {"thinking": False}
    try:
        response = http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise EngineFailed(
                f"the endpoint answered {response.status_code}: {response.text[:200]}", "kimisession logs shows its log"
            )
        return parse_answer(response.json())
    except httpx.TimeoutException:
        raise EngineFailed("the endpoint did not answer in time", "kimisession status shows what it is doing") from None
    except httpx.HTTPError as error:
        raise EngineFailed(
            f"the endpoint cannot be reached: {error}", "kimisession status shows whether it lives"
        ) from None


def parse_answer(raw: Any) -> Answer:
    """The answer in a chat completion. vLLM up to 0.15 calls the thinking `reasoning_content`, later `reasoning`."""
    try:
        message = raw["choices"][0]["message"]
        return Answer(
            content=message.get("content"),
            reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
            completion_tokens=int(raw["usage"]["completion_tokens"]),
            finish_reason=str(raw["choices"][0].get("finish_reason")),
            model=str(raw.get("model", "")),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineFailed(f"the endpoint's answer has not the shape of a completion: {error!r}") from None
