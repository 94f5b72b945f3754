from typing import Any

import pytest

from agentrl.inference.embedded.replies import BadRequestError
from agentrl.inference.embedded.request import SamplingOptions, parse_generate


def test_sglangs_defaults_and_names() -> None:
    options = SamplingOptions.parse({"stop": "x", "stop_token_ids": [3], "top_p": None, "n": 1, "min_p": 0.0})
    assert (options.stop, options.stop_token_ids, options.top_p, options.max_new_tokens) == (("x",), {3}, 1.0, 128)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_k": 0}, "top_k=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"stop": [""]}, "stop"),
        ({"regex": "a+"}, "regex='a\\+'"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"temprature": 1}, "temprature is unknown"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"stop_token_ids": 7}, "must be lists"),
    ],
)
def test_what_cannot_be_used_is_named(params: dict[str, Any], word: str) -> None:
    with pytest.raises(BadRequestError, match=word):
        SamplingOptions.parse(params)


def test_a_batch_shares_or_lists_its_options() -> None:
    body = {"input_ids": [[1], [2]], "sampling_params": {"temperature": 0}, "rid": "r", "return_logprob": True}
    inputs, batch = parse_generate(body)
    assert batch
    assert [row.rid for row in inputs] == ["r_0", "r_1"]
    assert all(row.logprobs and row.options.greedy for row in inputs)
    with pytest.raises(BadRequestError, match="rid has 1 entries for 2 prompts"):
        parse_generate({**body, "rid": ["a"]})


BODIES = [
    {},
    {"text": "hello"},
    {"input_ids": []},
    {"input_ids": [1], "stream": True},
    {"input_ids": [1], "logprob_start_len": 0},
    {"input_ids": [1, 2], "logprob_start_len": 0, "return_logprob": True},
    {"input_ids": [1, 2], "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}},
    {"input_ids": [1, 2], "logprob_start_len": 0, "return_logprob": True, "sampling_params": {"max_new_tokens": 1}},
    *(
        {"input_ids": [1, 2], "logprob_start_len": at, "return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
        for at in (-2, True, "0", 0.5)
    ),
]


@pytest.mark.parametrize("body", BODIES)
def test_bodies_that_cannot_be_served(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        parse_generate(body)


def test_a_prompt_is_scored_with_a_start_and_no_new_tokens() -> None:
    body = {"return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    [parsed], _ = parse_generate({**body, "input_ids": [1, 2, 3], "logprob_start_len": 1})
    assert (parsed.score_from, parsed.logprobs) == (1, True)
    inputs, _ = parse_generate({**body, "input_ids": [[1], [2, 3]], "logprob_start_len": [0, 1]})
    assert [request_input.score_from for request_input in inputs] == [0, 1]
