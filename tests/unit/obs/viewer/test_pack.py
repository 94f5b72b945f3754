"""What the page's script will unpack, unpacked here by the layout that agentrl/obs/viewer/page_data.py states."""

import json
import struct
import zlib
from dataclasses import replace

import numpy as np

from agentrl.core.images import ImageSpan
from agentrl.core.types import Failure, FailureKind, FinishReason, MaskReason, Provenance, SeatRecord, Turn
from agentrl.obs.viewer.page_data import Vocabulary, json_bytes, pack_rollout, runs


def unpack(packed):
    data = zlib.decompress(packed)
    (size,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + size])
    at = 4 + size
    for row in header["rows"]:
        for name, kind, count in (
            ("numbers", "<u4" if header["wide"] else "<u2", row["tokens"]),
            ("flags", "u1", row["tokens"]),
            ("logprobs", "<f2", row["sampled"]),
        ):
            row[name] = np.frombuffer(data, kind, count, at)
            at += row[name].nbytes
    assert at == len(data)
    return header


def test_everything_about_a_token_comes_back(make_rollout, pieces):
    rollout = make_rollout(pieces)
    vocabulary = Vocabulary()
    (row,) = unpack(pack_rollout(rollout, vocabulary))["rows"]
    source = rollout.rows[0]
    assert [vocabulary.ids[number] for number in row["numbers"]] == source.token_ids.tolist()
    np.testing.assert_array_equal(row["flags"] & 3, source.provenance)
    np.testing.assert_array_equal(row["flags"] >> 2 & 1, source.mask)
    np.testing.assert_array_equal(row["flags"] >> 3, source.mask_reason)
    np.testing.assert_allclose(row["logprobs"], source.logprobs[source.provenance == Provenance.SAMPLED], rtol=1e-3)
    assert row["versions"] == [[0, -1], [2, 3], [5, -1], [6, 3]]
    assert row["requests"] == [[0, -1], [2, 0], [5, -1], [6, 1]]
    assert row["request_ids"] == ["q0", "q1"]


def test_images_come_back_at_their_tokens(make_rollout, pieces, picture):
    rollout = make_rollout(pieces, images={picture.digest: picture})
    rollout.rows[0] = replace(rollout.rows[0], images=(ImageSpan(0, 2, picture.digest),))
    header = unpack(pack_rollout(rollout, Vocabulary(), with_images=True))
    assert header["rows"][0]["images"] == [[0, 2, picture.digest]]
    assert header["images"] == {picture.digest: picture.data_url}
    assert "images" not in unpack(pack_rollout(rollout, Vocabulary()))


def test_who_played_an_episode_comes_back(make_rollout, pieces):
    fixed = SeatRecord("player_0", "first", "random", trained=False, steps=(0,), moves=("bet",))
    played = {"episode": "e", "seat": 1, "seat_rewards": (1.0, -1.0), "seats": (fixed,)}
    player = unpack(pack_rollout(make_rollout(pieces, **played), Vocabulary()))["player"]
    assert player["seat_rewards"] == [1.0, -1.0]
    [seat] = player["seats"]
    assert (seat["player"], seat["trained"], seat["steps"], seat["moves"]) == ("random", False, [0], ["bet"])
    assert unpack(pack_rollout(make_rollout(pieces), Vocabulary()))["player"] is None


def test_a_vocabulary_beyond_16_bits_is_packed_wide(make_rollout):
    vocabulary = Vocabulary()
    vocabulary.number(np.arange(70_000, dtype=np.int32))
    narrow = unpack(pack_rollout(make_rollout([(Provenance.OBSERVED, MaskReason.OBSERVED, [65_535])]), vocabulary))
    wide = unpack(pack_rollout(make_rollout([(Provenance.OBSERVED, MaskReason.OBSERVED, [3, 65_536])]), vocabulary))
    assert (narrow["wide"], wide["wide"]) == (False, True)
    assert narrow["rows"][0]["numbers"].tolist() == [65_535]
    assert wide["rows"][0]["numbers"].tolist() == [3, 65_536]


def test_numbers_count_from_zero_and_stay(make_rollout):
    vocabulary = Vocabulary()
    first = vocabulary.number(np.array([9, 4, 9], np.int32))
    second = vocabulary.number(np.array([4, 100], np.int32))
    assert sorted({*first.tolist(), *second.tolist()}) == [0, 1, 2]
    assert [vocabulary.ids[number] for number in [*first, *second]] == [9, 4, 9, 4, 100]


def test_log_probabilities_beyond_half_precision_are_infinite(make_rollout):
    rollout = make_rollout([(Provenance.SAMPLED, MaskReason.NONE, [1, 2])])
    rollout.rows[0].logprobs[:] = [-1e6, -2.4e-7]
    logprobs = unpack(pack_rollout(rollout, Vocabulary()))["rows"][0]["logprobs"]
    assert logprobs[0] == -np.inf
    assert 0 >= logprobs[1] > -1e-6


def test_texts_are_kept_only_without_tokens(make_rollout, pieces):
    turns = [Turn("say", "hear", FinishReason.STOP, 0.5)]
    failure = Failure(FailureKind.TOOL, "ToolFailure", "gone")
    full_rollout = unpack(
        pack_rollout(make_rollout(pieces, turns=turns, label="Paris", metadata={"hops": 2}), Vocabulary())
    )
    bare = unpack(pack_rollout(make_rollout([], turns=turns, failure=failure), Vocabulary()))
    assert full_rollout["turns"] == [{"finish": "stop", "reward": 0.5}]
    assert (full_rollout["prompt"], full_rollout["label"], full_rollout["metadata"]) == (None, "Paris", {"hops": 2})
    assert (bare["prompt"], bare["turns"][0]["action"], bare["turns"][0]["observation"]) == ("What?", "say", "hear")
    assert bare["failure"] == {"kind": "tool", "error": "ToolFailure", "message": "gone"}


def test_runs():
    assert runs(np.array([], np.int32)) == []
    assert runs(np.array([0, 0, 1, 0], np.uint8)) == [[0, 0], [2, 1], [3, 0]]


def test_json_is_what_browsers_read():
    assert (
        json_bytes({"a": float("nan"), "b": [float("-inf"), 1.5], 3: "\ud800"}) == b'{"a":null,"b":[null,1.5],"3":"?"}'
    )
