"""Sampling supports: parts, places and text of them are what one makes of lists of ids, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.sampling_support import SamplingSupport, concatenate_supports, decode_support, encode_support
from tests.supports import assert_same_support

TOKENS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4, unique=True), max_size=8)


def make_support(ids: list[list[int]], *, logprobs: bool = True) -> SamplingSupport:
    values = np.array([-(number + 1) / 7 for kept in ids for number in range(len(kept))], np.float32)
    flat_ids = np.array([token for kept in ids for token in kept], np.int32)
    return SamplingSupport(np.array([*map(len, ids)], np.int32), flat_ids, values if logprobs else None)


@given(TOKENS, st.booleans(), st.data())
def test_parts_and_places_are_those_of_lists(ids: list[list[int]], logprobs: bool, data: st.DataObject) -> None:
    support = make_support(ids, logprobs=logprobs)
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    assert_same_support(
        concatenate_supports([support.slice(0, start), support.slice(start, stop), support.slice(stop, len(ids))],
                            [start, stop - start, len(ids) - stop]),
        support,
    )  # fmt: skip
    assert_same_support(support.slice(start, stop), make_support(ids[start:stop], logprobs=logprobs))
    places = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=6)) if ids else []
    selected = [ids[place] for place in places]
    assert_same_support(support.select(np.array(places, np.int64)), make_support(selected, logprobs=logprobs))


@given(TOKENS, st.booleans())
def test_text_has_every_id_and_every_bit(ids: list[list[int]], logprobs: bool) -> None:
    support = make_support(ids, logprobs=logprobs)
    assert_same_support(decode_support(encode_support(support)), support)
    assert not support.has_repeated_ids


def test_a_damaged_text_is_refused() -> None:
    text = encode_support(make_support([[5, 6], [7]]))
    assert text is not None
    for damaged in (text[:-8], "AAAA" + text[4:], "not base64"):
        with pytest.raises(ValueError, match=r"damaged|bytes|base64|padding|characters"):
            decode_support(damaged)


def test_what_is_not_known_has_no_ids() -> None:
    known = make_support([[3, 4], [5]])
    joined = concatenate_supports([None, known, None], [2, 2, 1])
    assert joined is not None
    assert joined.counts.tolist() == [0, 0, 2, 1, 0]
    assert joined.contains(np.array([3, 3, 4, 6, 5])).tolist() == [False, False, True, False, False]
    assert concatenate_supports([None, None], [1, 2]) is None
    assert joined.logprobs is not None
    without = concatenate_supports([known, make_support([[9]], logprobs=False)], [2, 1])
    assert without is not None
    assert without.logprobs is None
    assert make_support([[4, 4]]).has_repeated_ids
    assert known.sampled_logprobs(np.array([4, 5])).tolist() == pytest.approx([-2 / 7, -1 / 7])
