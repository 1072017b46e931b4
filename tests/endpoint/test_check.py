"""`kimisession test` over the questions that also run alone."""

from pathlib import Path

import pytest
from serving import KEY, Reply, answering, standin

from kimisession.endpoint.check import run_checks
from kimisession.errors import EngineFailed
from kimisession.node.inference import PROMPTS, NoAnswer, parse_answer


def test_each_question_is_answered_and_timed(tmp_path: Path) -> None:
    with standin(
        tmp_path, "--served-model-name", "kimi-k2.5", "--tokens-per-second", "2000", "--ttft-s", "0.01"
    ) as url:
        checks = list(run_checks(url, KEY, "kimi-k2.5-stand-in", 1024))
    assert [check.name for check in checks] == [name for name, _ in PROMPTS]
    for check in checks:
        assert check.answer.content
        assert not check.answer.still_thinking
        assert check.seconds >= 0.01
        assert check.tokens_per_second == check.answer.completion_tokens / check.seconds


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b'{"error": "Unauthorized"}', "401"),
        (200, b"<html>", "does not answer"),
        (200, b"[]", "shape"),
        (200, b'{"choices": []}', "shape"),
    ],
)
def test_anything_but_an_answer_is_an_engine_that_failed(status: int, body: bytes, says: str) -> None:
    with answering(lambda path, headers, sent: Reply([body], status)) as url, pytest.raises(EngineFailed, match=says):
        list(run_checks(url, KEY, "m", 8))


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_null_content_is_still_thinking(field: str) -> None:
    choice = {"message": {"content": None, field: "Hm"}, "finish_reason": "length"}
    answer = parse_answer({"choices": [choice], "usage": {"completion_tokens": 8}})
    assert answer.still_thinking
    assert (answer.reasoning, answer.completion_tokens) == ("Hm", 8)


@pytest.mark.parametrize(
    "raw", [None, [], {}, {"choices": [{}]}, {"choices": [{"message": {}}], "usage": None}, "text"]
)
def test_what_has_not_the_shape_of_an_answer_is_told(raw: object) -> None:
    with pytest.raises(NoAnswer, match="shape"):
        parse_answer(raw)
