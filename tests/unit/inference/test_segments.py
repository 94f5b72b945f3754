import pytest

from agentrl.core.errors import SamplerError
from agentrl.core.types import FinishReason
from agentrl.inference.client.segments import Part, join, read_part, version_number


def part(texts: list[str], finish: FinishReason, version: int, first: int = 0) -> Part:
    ids = list(range(first, first + len(texts)))
    return Part(ids, [-1.0 * token for token in ids], finish, ((0, version),), 3, "".join(texts), texts, True)


def test_tokens_and_versions_are_joined() -> None:
    whole = join([part(["a", "b"], FinishReason.ABORT, 4), part(["c"], FinishReason.LENGTH, 6, first=2)], [])
    assert whole.token_ids == [0, 1, 2]
    assert whole.versions == ((0, 4), (2, 6))
    assert whole.finish is FinishReason.LENGTH
    assert whole.cached_tokens == 3


def test_the_same_weights_are_named_once() -> None:
    whole = join([part(["a"], FinishReason.ABORT, 4), part(["c"], FinishReason.STOP, 4, first=1)], [])
    assert whole.versions == ((0, 4),)


def test_a_stop_string_over_the_border_ends_the_turn_there() -> None:
    """``</sea`` was sampled before the pause, ``rch>x`` after it; what follows is dropped."""
    left = part(["x", "</", "sea"], FinishReason.ABORT, 1)
    right = part(["rc", "h>x", "more", "more"], FinishReason.LENGTH, 2, first=3)
    whole = join([left, right], ["</answer>", "</search>"])
    assert whole.token_ids == [0, 1, 2, 3, 4]
    assert whole.logprobs == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert whole.finish is FinishReason.STOP
    assert whole.versions == ((0, 1), (3, 2))


def test_a_stop_string_over_three_parts() -> None:
    one = part(["</s"], FinishReason.ABORT, 1)
    two, three = part(["ea"], FinishReason.ABORT, 2, first=1), part(["rch>", "z"], FinishReason.LENGTH, 3, first=2)
    whole = join([join([one, two], ["</search>"]), three], ["</search>"])
    assert whole.token_ids == [0, 1, 2]
    assert whole.finish is FinishReason.STOP


def test_what_only_looks_like_a_stop_string_goes_on() -> None:
    left, right = part(["</sea"], FinishReason.ABORT, 1), part(["side>", "x"], FinishReason.LENGTH, 2, first=1)
    assert join([left, right], ["</search>"]).token_ids == [0, 1, 2]


def test_a_reply_of_sglang_is_read() -> None:
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]],
        "cached_tokens": 4,
        "weight_version": "12",
    }
    read = read_part({"text": "ab", "output_ids": [7, 8], "meta_info": meta})
    assert (read.token_ids, read.logprobs, read.versions, read.exact) == ([7, 8], [-0.5, -1.0], ((0, 12),), False)


OTHER_IDS = {
    "output_ids": [1],
    "meta_info": {"output_token_logprobs": [[0.0, 2, None]], "finish_reason": {"type": "stop"}},
}


@pytest.mark.parametrize("broken", [{}, {"meta_info": {}}, OTHER_IDS])
def test_a_reply_without_what_is_needed_is_an_error(broken: dict[str, object]) -> None:
    with pytest.raises(SamplerError):
        read_part(broken)


def test_versions_are_numbers() -> None:
    assert version_number("default") == 0
    assert version_number("17") == 17
    with pytest.raises(SamplerError, match="mine"):
        version_number("mine")
