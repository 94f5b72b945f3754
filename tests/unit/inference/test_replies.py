"""Replies of an engine: what is believed, what is refused, and the joining of segments of a turn that a pause cut."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import SamplerError
from agentrl.core.types import FinishReason, Generation
from agentrl.episode.trajectory import Trajectory
from agentrl.inference.client.generation import read_reply, version_number
from agentrl.inference.client.segments import Segment, Vocabulary, join

PIECES = ["x", "</", "sea", "rc", "h>x", "more", "</s", "ea", "rch>", "z", "side>", "é"[0]]
VOCABULARY = Vocabulary(50, lambda ids: b"".join(TOKENS[token] for token in ids).decode(errors="replace"))
TOKENS = [*(piece.encode() for piece in PIECES), *(bytes([byte]) for byte in "é€".encode()), *[b"?"] * 33]
BODY = {"rid": "r:0", "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
META = {
    "id": "r:0",
    "finish_reason": {"type": "length", "length": 2},
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]],
    "cached_tokens": 2,
    "weight_version": "12",
    "weight_versions": [{"version": "11", "start": 0, "end": 1}, {"version": "12", "start": 1, "end": 2}],
}
REPLY = {"text": "ab", "output_ids": [7, 8], "meta_info": META}
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 3, 49, 50, 2**31, 2**63, 10**30, 0.5, 1e-3, 1e39, -1e39, "", "7", "default", "-3", "²", "9" * 40,
    "abort", "\ud800".encode("utf-8", "surrogatepass").decode("latin1"), [], [[]], [None], [7], [7, 8, 9], [[0.0, 7]],
    [[-0.5, 7, None]] * 5, [[None, 7, None], [-1.0, 8, None]], {}, {"type": None}, {"type": "length"}, {"start": -1},
    [{"start": 0, "version": "12"}, {"start": 1, "version": "3"}], [{"start": 1, "version": "3"}],
]  # fmt: skip


def places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


def mutated(at: tuple[str | int, ...], junk: Any, *, drop: bool = False) -> Any:
    reply = copy.deepcopy(REPLY)
    if not at:
        return junk
    inner: Any = reply
    for key in at[:-1]:
        inner = inner[key]
    if drop:
        del inner[at[-1]]
    else:
        inner[at[-1]] = junk
    return reply


def believed(content: bytes) -> Generation | None:
    """What a run would record of a reply: None if it is refused as the sampler's failure; other errors leave this."""
    try:
        generation = read_reply(content, BODY, "r", VOCABULARY).generation
        trajectory = Trajectory()
        trajectory.extend_to(tuple(BODY["input_ids"]))  # type: ignore[arg-type]
        trajectory.append_sampled(generation)
    except SamplerError:
        return None
    for row in trajectory.rows("p", "r"):
        sampled = row.mask != 0
        assert np.isfinite(row.logprobs).all()
        assert (row.logprobs <= 0).all()
        assert (row.token_ids < VOCABULARY.size).all()
        assert (row.token_ids >= 0).all()
        assert (row.versions[sampled] >= 0).all()
        assert (np.diff(row.versions[sampled]) >= 0).all()
    return generation


def test_a_reply_is_read() -> None:
    read = read_reply(orjson.dumps(REPLY), BODY, "r", VOCABULARY)
    assert read.generation == Generation((7, 8), (-0.5, -1.0), FinishReason.LENGTH, ((0, 11), (1, 12)), 2, "r")
    assert read.exact


def test_a_reply_of_an_older_sglang_has_one_version() -> None:
    read = read_reply(orjson.dumps(mutated(("meta_info", "weight_versions"), None, drop=True)), BODY, "r")
    assert (read.generation.versions, read.exact) == (((0, 12),), False)


def test_a_request_that_was_aborted_before_it_ran_has_no_tokens() -> None:
    meta = {"id": "r:0", "finish_reason": {"type": "abort", "message": "Aborted"}, "output_token_logprobs": None}
    read = read_reply(
        orjson.dumps({"meta_info": {**meta, "weight_versions": [{"start": 0, "version": "3"}]}}), BODY, "r"
    )
    assert read.generation == Generation((), (), FinishReason.ABORT, (), 0, "r")


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (("prompt_tokens",), 4, "counts 4 prompt tokens, 3 were sent"),
        (("completion_tokens",), 3, "counts 3 tokens and has 2"),
        (("id",), "r:1", "is to 'r:1', not to 'r:0'"),
        (("output_token_logprobs", 1, 1), 50, "output_ids"),
        (("output_token_logprobs", 0, 0), 0.5, "has a log-probability of 0.5"),
        (("output_token_logprobs", 0, 0), None, r"output_token_logprobs\[0\]\[0\]"),
        (("finish_reason", "type"), "tired", "tired"),
        (("weight_version",), "mine", "mine"),
    ],
)
def test_a_refusal_has_both_numbers(at: tuple[str | int, ...], value: Any, words: str) -> None:
    reply = mutated(("meta_info", *at), value)
    if at == ("weight_version",):
        del reply["meta_info"]["weight_versions"]
    with pytest.raises(SamplerError, match=words):
        read_reply(orjson.dumps(reply), BODY, "r", VOCABULARY)


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    reply = mutated(("meta_info", "output_token_logprobs", 1, 1), 50)
    reply["output_ids"] = [7, 50]
    with pytest.raises(SamplerError, match=r"token id 50, but the policy has 50 tokens.*model\.path"):
        read_reply(orjson.dumps(reply), BODY, "r", VOCABULARY)


def test_an_end_that_the_renderer_does_not_know_is_refused() -> None:
    """The engine has another model's end tokens, so the text of the end would be part of the turn."""
    body = {**BODY, "sampling_params": {"max_new_tokens": 4, "stop_token_ids": [8]}}
    for matched, known in ((8, True), (7, False), ("</s>", True)):
        reply = orjson.dumps(mutated(("meta_info", "finish_reason"), {"type": "stop", "matched": matched}))
        if known:
            assert read_reply(reply, body, "r", VOCABULARY).generation.finish_reason is FinishReason.STOP
            continue
        with pytest.raises(
            SamplerError, match=r"ended at token 7, .* another eos_token_id in .*generation_config\.json"
        ):
            read_reply(reply, body, "r", VOCABULARY)


def test_rounding_above_zero_becomes_zero() -> None:
    reply = orjson.dumps(mutated(("meta_info", "output_token_logprobs", 0, 0), 1e-7))
    assert read_reply(reply, BODY, "r", VOCABULARY).generation.logprobs == (0.0, -1.0)


def test_nothing_that_an_engine_answers_raises_past_the_sampler() -> None:
    """Every field with every kind of junk, and without it; what is believed can be recorded and trained on."""
    cases = [orjson.dumps(mutated(at, None, drop=True)) for at in places(REPLY) if at]
    cases += [orjson.dumps(mutated(at, junk)) for at in places(REPLY) for junk in JUNK if not _too_large(junk)]
    cases += [
        orjson.dumps(REPLY).replace(b"-0.5", text) for text in (b"NaN", b"1e999", b"-1e999", b"Infinity", b"10" * 40)
    ]
    payload = orjson.dumps(REPLY)
    cases += [payload[:end] for end in range(len(payload))]
    cases += [b"", b"<html>", b"\xff\xfe", b"null", b"[" * 100_000, b'{"meta_info":' * 5_000]
    kept = [row for row in map(believed, cases) if row is not None]
    assert len(cases) > 1000
    assert all(row.token_ids == (7, 8) for row in kept if row.finish_reason is not FinishReason.ABORT)


def _too_large(junk: Any) -> bool:
    return isinstance(junk, int) and junk > 2**63


@given(
    st.lists(st.tuples(st.floats(), st.integers(), st.none() | st.text()), max_size=3),
    st.sampled_from(FinishReason),
    st.lists(st.tuples(st.integers(), st.integers() | st.text(max_size=5)), max_size=3),
)
def test_whatever_numbers_an_engine_answers(
    entries: list[tuple[float, int, str | None]], finish: FinishReason, spans: list[tuple[int, int | str]]
) -> None:
    def number(value: int) -> int:
        return max(min(value, 2**63), -(2**63))

    meta = {
        **META,
        "finish_reason": {"type": finish.value},
        "completion_tokens": len(entries),
        "output_token_logprobs": [[value, number(token), None] for value, token, _ in entries],
        "weight_versions": [
            {"start": number(start), "version": number(name) if isinstance(name, int) else name}
            for start, name in spans
        ],
    }
    ids = [number(token) for _, token, _ in entries]
    actual = believed(orjson.dumps({"output_ids": ids, "meta_info": meta}))
    if actual is not None:
        assert list(actual.token_ids) == ids
        assert all(math.isfinite(value) for value, _, _ in entries)


def segment(ids: list[int], finish: FinishReason, version: int) -> Segment:
    logprobs = tuple(-1.0 * token for token in ids)
    generation = Generation(tuple(ids), logprobs, finish, ((0, version),), 3, "r", verified=len(ids))
    return Segment(generation, exact=True)


def test_tokens_and_versions_are_joined() -> None:
    full_generation = join(segment([0, 1], FinishReason.ABORT, 4), segment([2], FinishReason.LENGTH, 6), []).generation
    assert full_generation.token_ids == (0, 1, 2)
    assert full_generation.versions == ((0, 4), (2, 6))
    assert full_generation.finish_reason is FinishReason.LENGTH
    assert (full_generation.cached_tokens, full_generation.verified) == (3, 3)


def test_the_same_weights_are_named_once() -> None:
    full_generation = join(segment([0], FinishReason.ABORT, 4), segment([1], FinishReason.STOP, 4), []).generation
    assert full_generation.versions == ((0, 4),)


def test_a_stop_string_over_the_border_ends_the_turn_there() -> None:
    """``</sea`` was sampled before the pause, ``rch>x`` after it; what follows is dropped."""
    aborted = segment([0, 1, 2], FinishReason.ABORT, 1)
    right = segment([3, 4, 5, 5], FinishReason.LENGTH, 2)
    full_generation = join(aborted, right, ["</answer>", "</search>"], VOCABULARY).generation
    assert full_generation.token_ids == (0, 1, 2, 3, 4)
    assert full_generation.logprobs == (0.0, -1.0, -2.0, -3.0, -4.0)
    assert full_generation.finish_reason is FinishReason.STOP
    assert full_generation.versions == ((0, 1), (3, 2))


def test_a_stop_string_over_three_parts() -> None:
    aborted = segment([6], FinishReason.ABORT, 1)
    two, three = segment([7], FinishReason.ABORT, 2), segment([8, 9], FinishReason.LENGTH, 3)
    full_generation = join(join(aborted, two, ["</search>"], VOCABULARY), three, ["</search>"], VOCABULARY).generation
    assert full_generation.token_ids == (6, 7, 8)
    assert full_generation.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("character", ["é", "€"])
def test_a_stop_string_cut_inside_a_character(character: str) -> None:
    """Each token is one byte of the character; every border between them."""
    first = len(PIECES) + "é€".encode().index(character.encode())
    ids = list(range(first, first + len(character.encode())))
    for border in range(1, len(ids)):
        first_segment, right = (
            segment([0, *ids[:border]], FinishReason.ABORT, 1),
            segment([*ids[border:], 5], FinishReason.LENGTH, 2),
        )
        full_generation = join(first_segment, right, [character], VOCABULARY).generation
        assert full_generation.token_ids == (0, *ids)
        assert full_generation.finish_reason is FinishReason.STOP


def test_what_only_looks_like_a_stop_string_goes_on() -> None:
    first_segment, right = segment([1, 2], FinishReason.ABORT, 1), segment([10, 0], FinishReason.LENGTH, 2)
    assert join(first_segment, right, ["</search>"], VOCABULARY).generation.token_ids == (1, 2, 10, 0)


def test_a_stop_string_that_cannot_be_looked_for_is_an_error() -> None:
    with pytest.raises(SamplerError, match="has no vocabulary"):
        join(segment([1], FinishReason.ABORT, 1), segment([2], FinishReason.STOP, 2), ["</s>"])


def test_versions_are_numbers() -> None:
    assert version_number("default") == 0
    assert version_number("17") == 17
    assert version_number("17-3f", "3f") == version_number("17-3f") == 17
    for name in ("mine", "-1", "²", "9" * 20, ""):
        with pytest.raises(SamplerError, match="weight_version"):
            version_number(name)


def test_the_adapter_of_a_request_is_its_version() -> None:
    """The engine reports its newest version, but each request is sampled with the adapter that it names."""
    segment = read_reply(orjson.dumps(REPLY), BODY | {"lora_path": "policy-v4-0a1b"}, "r")
    assert segment.exact
    assert segment.generation.versions == ((0, 4),)
