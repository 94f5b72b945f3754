"""A teacher's replies: which log-probabilities are believed, what is sent again, and what ends the run."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from agentrl.core.errors import EngineError, SamplerError
from agentrl.inference.client import scoring
from agentrl.inference.client.http import ErrorReply
from agentrl.inference.client.scoring import ScoringClient, read_scores, score_body
from tests.unit.inference.fake_http import replying

SIZE = 50
IDS = [4, 7, 9, 49]
BODY = score_body(IDS, 2, "s-0")
META = {
    "id": "s-0",
    "finish_reason": {"type": "length", "length": 0},
    "prompt_tokens": 4,
    "completion_tokens": 0,
    "input_token_logprobs": [[None, 7, None], [-0.5, 9, None], [-1.5, 49, None]],
    "output_token_logprobs": [],
}
REPLY = {"text": "", "output_ids": [], "meta_info": META}


def changed(at: tuple[str | int, ...], value: Any) -> bytes:
    reply: Any = copy.deepcopy(REPLY)
    inner = reply["meta_info"]
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return orjson.dumps(reply)


def test_the_body_asks_for_one_token_before_because_engines_leave_out_the_first() -> None:
    assert BODY == {
        "input_ids": IDS,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 1,
        "rid": "s-0",
    }


def test_scores_are_read() -> None:
    assert read_scores(orjson.dumps(REPLY), BODY, SIZE) == (-0.5, -1.5)


def test_sglang_writes_0_for_the_last_id_of_a_vocabulary_and_for_no_other() -> None:
    assert read_scores(changed(("input_token_logprobs", 2, 1), 0), BODY, SIZE) == (-0.5, -1.5)
    with pytest.raises(SamplerError, match="other token ids"):
        read_scores(changed(("input_token_logprobs", 1, 1), 0), BODY, SIZE)
    with pytest.raises(SamplerError, match="other token ids"):
        read_scores(changed(("input_token_logprobs", 2, 1), 0), BODY, SIZE + 1)


def test_rounding_above_zero_becomes_zero() -> None:
    assert read_scores(changed(("input_token_logprobs", 1, 0), 1e-7), BODY, SIZE) == (0.0, -1.5)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (("id",), "s-1", "is to 's-1', not to 's-0'"),
        (("prompt_tokens",), 3, "counts 3 prompt tokens, 4 were sent"),
        (("completion_tokens",), 1, "has 1 sampled tokens"),
        (("finish_reason", "type"), "abort", "ended with 'abort'"),
        (("input_token_logprobs", 1, 1), 8, "other token ids"),
        (("input_token_logprobs", 1, 0), 0.5, "log-probability of 0.5"),
        (("input_token_logprobs", 2, 0), None, "no log-probability"),
        (("input_token_logprobs", 2, 0), "-1.5", "input_token_logprobs.2"),
        (("input_token_logprobs",), META["input_token_logprobs"][1:], "has 2 scored tokens, 3 were requested"),  # type: ignore[index]
        (("input_token_logprobs",), [], "has 1 scored tokens, 3 were requested"),
        (("input_token_logprobs",), None, "input_token_logprobs"),
    ],
)
def test_a_reply_that_does_not_answer_the_request_is_refused(at: tuple[str | int, ...], value: Any, words: str) -> None:
    with pytest.raises(SamplerError, match=words):
        read_scores(changed(at, value), BODY, SIZE)


@pytest.mark.parametrize("content", [b"", b"nothing", b"[]", b'{"meta_info": NaN}', b"{}"])
def test_what_is_no_reply_is_refused(content: bytes) -> None:
    with pytest.raises(SamplerError, match="is not one"):
        read_scores(content, BODY, SIZE)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
def test_numbers_that_are_not_finite_are_refused(number: bytes) -> None:
    with pytest.raises(SamplerError):
        read_scores(orjson.dumps(REPLY).replace(b"-0.5", number), BODY, SIZE)


class Server:
    """Answers in turn with these; an exception is raised, and a reply to `SENT` is one to the request."""

    url = "http://teacher"

    def __init__(self, *answers: Any) -> None:
        self.answers: Iterator[Any] = iter(answers)
        self.ids: list[str] = []

    def request(self, method: str, path: str, body: Any) -> Any:
        async def answer() -> Any:
            self.ids.append(body["rid"])
            answer = next(self.answers)
            if isinstance(answer, Exception):
                raise answer
            if answer["meta_info"]["id"] == SENT:
                return {**answer, "meta_info": {**answer["meta_info"], "id": body["rid"]}}
            return answer

        return replying(answer())


def scored(*answers: Any) -> tuple[Any, Server]:
    client = ScoringClient("http://teacher", "teacher 'a' (key)", timeout_s=1, vocabulary_size=SIZE)
    server = client._http = Server(*answers)  # type: ignore[assignment]
    return asyncio.run(client.score(IDS, 2)), server  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_BACKOFF_S", 0.0)


SENT = "the id that was sent"
GOOD = {**REPLY, "meta_info": {**META, "id": SENT}}


def test_a_failure_of_the_server_is_tried_again() -> None:
    actual, server = scored(ErrorReply(503, "starting"), aiohttp.ClientPayloadError(), GOOD)
    np.testing.assert_array_equal(actual, np.array([-0.5, -1.5], np.float32))
    assert len(set(server.ids)) == 3, "a server refuses the id of a request that it has not ended yet"


def test_clients_of_one_server_have_different_ids() -> None:
    assert len({request_id for _ in range(3) for request_id in scored(GOOD)[1].ids}) == 3


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([ErrorReply(400, "too long")], "teacher 'a' .key. refuses a request at http://teacher: HTTP 400: too long"),
        ([ErrorReply(500, "broken")] * 3, "refuses.*broken"),
        ([TimeoutError()], "does not answer"),
        ([aiohttp.ClientConnectionError()], "does not answer"),
        ([aiohttp.ClientPayloadError()] * 3, "does not answer"),
        ([REPLY], "teacher 'a' .key., http://teacher: the reply to score-[0-9a-f]*-0-1 is to 's-0'"),
    ],
)
def test_a_teacher_that_is_down_or_answers_nonsense_is_named_with_its_key(answers: list[Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        scored(*answers)
