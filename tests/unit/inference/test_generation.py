"""Reading replies of an engine, and joining the segments of a turn that a pause cut."""

import orjson
import pytest

from agentrl.core.errors import SamplerError
from agentrl.core.types import FinishReason, Generation
from agentrl.inference.client.generation import Segment, join, read_reply, version_number


def segment(texts: list[str], finish: FinishReason, version: int, first: int = 0) -> Segment:
    ids = tuple(range(first, first + len(texts)))
    logprobs = tuple(-1.0 * token for token in ids)
    return Segment(Generation(ids, logprobs, finish, ((0, version),), 3, "r"), "".join(texts), texts, True)


def test_tokens_and_versions_are_joined() -> None:
    whole = join(
        segment(["a", "b"], FinishReason.ABORT, 4), segment(["c"], FinishReason.LENGTH, 6, first=2), []
    ).generation
    assert whole.token_ids == (0, 1, 2)
    assert whole.versions == ((0, 4), (2, 6))
    assert whole.finish_reason is FinishReason.LENGTH
    assert whole.cached_tokens == 3


def test_the_same_weights_are_named_once() -> None:
    whole = join(segment(["a"], FinishReason.ABORT, 4), segment(["c"], FinishReason.STOP, 4, first=1), []).generation
    assert whole.versions == ((0, 4),)


def test_a_stop_string_over_the_border_ends_the_turn_there() -> None:
    """``</sea`` was sampled before the pause, ``rch>x`` after it; what follows is dropped."""
    left = segment(["x", "</", "sea"], FinishReason.ABORT, 1)
    right = segment(["rc", "h>x", "more", "more"], FinishReason.LENGTH, 2, first=3)
    whole = join(left, right, ["</answer>", "</search>"]).generation
    assert whole.token_ids == (0, 1, 2, 3, 4)
    assert whole.logprobs == (0.0, -1.0, -2.0, -3.0, -4.0)
    assert whole.finish_reason is FinishReason.STOP
    assert whole.versions == ((0, 1), (3, 2))


def test_a_stop_string_over_three_parts() -> None:
    one = segment(["</s"], FinishReason.ABORT, 1)
    two, three = (
        segment(["ea"], FinishReason.ABORT, 2, first=1),
        segment(["rch>", "z"], FinishReason.LENGTH, 3, first=2),
    )
    whole = join(join(one, two, ["</search>"]), three, ["</search>"]).generation
    assert whole.token_ids == (0, 1, 2)
    assert whole.finish_reason is FinishReason.STOP


def test_what_only_looks_like_a_stop_string_goes_on() -> None:
    left, right = segment(["</sea"], FinishReason.ABORT, 1), segment(["side>", "x"], FinishReason.LENGTH, 2, first=1)
    assert join(left, right, ["</search>"]).generation.token_ids == (0, 1, 2)


def test_a_reply_of_sglang_is_read() -> None:
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]],
        "cached_tokens": 4,
        "weight_version": "12",
    }
    read = read_reply(orjson.dumps({"text": "ab", "output_ids": [7, 8], "meta_info": meta}), "r")
    assert read.generation == Generation((7, 8), (-0.5, -1.0), FinishReason.LENGTH, ((0, 12),), 4, "r")
    assert (read.text, read.exact) == ("ab", False)


OTHER_IDS = {
    "output_ids": [1],
    "meta_info": {"output_token_logprobs": [[0.0, 2, None]], "finish_reason": {"type": "stop"}},
}


@pytest.mark.parametrize(
    "broken", [b"{}", b'{"meta_info": {}}', b"[]", b"null", b"", b"<html>", orjson.dumps(OTHER_IDS)]
)
def test_a_reply_without_what_is_needed_is_an_error(broken: bytes) -> None:
    with pytest.raises(SamplerError):
        read_reply(broken, "r")


def test_versions_are_numbers() -> None:
    assert version_number("default") == 0
    assert version_number("17") == 17
    with pytest.raises(SamplerError, match="mine"):
        version_number("mine")
