"""Layout of the rows made here: token ``i`` of row ``r`` is ``1000 r + i``, so that every token is unique."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch.loss_weights import row_weights
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import MULTIPLE
from agentrl.batch.provenance import check_provenance
from agentrl.core.types import MaskReason, Provenance, Row, RowKey
from tests.batches import pack_rows

PAD = 999_999


def row(number, mask, rollout=None, row_part=0, provenance=Provenance.SAMPLED):
    mask = np.array(mask, np.uint8)
    size = len(mask)
    return Row(
        key=RowKey(f"p{(rollout or 0) % 2}", f"r{number if rollout is None else rollout}", "main", row_part),
        token_ids=np.arange(size, dtype=np.int32) + 1000 * number,
        provenance=np.where(mask, provenance, Provenance.OBSERVED).astype(np.uint8),
        mask=mask,
        mask_reason=np.where(mask, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.where(mask, -0.5 - number, 0).astype(np.float32),
        versions=np.where(mask, number, -1).astype(np.int32),
        requests=np.where(mask, 0, -1).astype(np.int32),
        request_ids=(f"q{number}",),
    )


def packed(rows, advantages=None, **changes):
    given_ = {"data_parallel_size": 1, "tokens_per_micro": 32, "pad_id": PAD} | changes
    return pack_rows(rows, {made.key: 1.0 for made in rows} if advantages is None else advantages, **given_)


def tokens(batch: GlobalBatch):
    """Return ``{token id: its fields}`` of all that is no padding, checking the layout on the way."""
    columns = {}
    for rank in batch.micro:
        for micro in rank:
            rows_L = micro.row_L.tolist()
            assert len(rows_L) % MULTIPLE == 0
            for at, number in enumerate(rows_L):
                token, position = int(micro.token_ids_L[at]), int(micro.position_ids_L[at])
                if at and rows_L[at - 1] == number:
                    assert position == int(micro.position_ids_L[at - 1]) + 1
                else:
                    assert position == 0
                fields = [getattr(micro, name)[at].item() for name in _FIELDS]
                if number < 0:
                    assert (token, fields) == (PAD, [False, 0, 0, 0, 0, -1, -1])
                    continue
                assert token not in columns
                assert token % 1000 == position
                assert fields[0] == (fields[1] > 0)
                columns[token] = (micro.keys[number], *fields)
    return columns


_FIELDS = ("mask_L", "weight_L", "advantages_L", "logprobs_L", "provenance_L", "versions_L", "requests_L")


@st.composite
def batches(draw):
    """Rows of any masks; several may belong to one rollout."""
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=40), max_size=9))
    rollouts = [draw(st.integers(0, max(0, len(masks) - 1))) for _ in masks]
    made = [row(n, mask, rollout, n) for n, (mask, rollout) in enumerate(zip(masks, rollouts, strict=True))]
    limits = {
        "data_parallel_size": draw(st.integers(1, 3)),
        "tokens_per_micro": draw(st.integers(1, 128)),
        "aggregation": draw(st.sampled_from(["token_mean", "rollout_mean"])),
    }
    return made, limits


def trained(made):
    return [row for row in made if row.mask[1:].any()]


@given(batches())
def test_every_token_of_a_row_to_train_is_packed_once(batch):
    made, limits = batch
    actual_tokens = tokens(packed(made, **limits))
    assert set(actual_tokens) == {int(token) for row in trained(made) for token in row.token_ids}
    for row in trained(made):
        for position, token in enumerate(row.token_ids.tolist()):
            key, mask, _, advantage, logprob, provenance, version, request = actual_tokens[token]
            assert key == row.key
            assert mask == (position > 0 and bool(row.mask[position]))
            assert advantage == float(mask)
            assert logprob == row.logprobs[position]
            assert (provenance, version, request) == (
                row.provenance[position],
                row.versions[position],
                row.requests[position],
            )


@given(batches())
def test_shares_have_equally_many_micro_batches_within_the_limits(batch):
    made, limits = batch
    batch = packed(made, **limits)
    assert len(batch.micro) == limits["data_parallel_size"]
    assert len({len(rank) for rank in batch.micro}) == 1
    longest = max([0, *(len(row.token_ids) for row in made)])
    for rank in batch.micro:
        assert rank
        for micro in rank:
            assert len(micro.token_ids_L) < max(limits["tokens_per_micro"], longest) + MULTIPLE


@given(batches(), st.randoms(use_true_random=False))
def test_the_batch_does_not_depend_on_the_order_of_rows(batch, random):
    made, limits = batch
    shuffled = list(made)
    random.shuffle(shuffled)
    in_order, in_other_order = packed(made, **limits), packed(shuffled, **limits)
    for mine, theirs in zip(in_order.micro, in_other_order.micro, strict=True):
        for left, right in zip(mine, theirs, strict=True):
            assert left.keys == right.keys
            assert all(getattr(left, n).equal(getattr(right, n)) for n in ("token_ids_L", "row_L", *_FIELDS))


@given(batches(), st.integers(1, 4), st.integers(1, 64))
def test_weights_do_not_depend_on_packing_or_shares_and_sum_to_1(batch, shares, size):
    made, limits = batch
    first = tokens(packed(made, **limits))
    second = tokens(packed(made, **limits | {"data_parallel_size": shares, "tokens_per_micro": size}))
    assert first == second
    assert math.isclose(sum(fields[2] for fields in first.values()), 1 if trained(made) else 0, rel_tol=1e-5)


@given(batches())
def test_weights_by_rollout(batch):
    made, _ = batch
    sums: dict[str, float] = {}
    for row, weight in zip(made, row_weights(made, "rollout_mean"), strict=True):
        sums[row.key.rollout_id] = sums.get(row.key.rollout_id, 0.0) + float(weight.sum())
    rollouts = {row.key.rollout_id for row in trained(made)}
    assert all(math.isclose(total, 1 / len(rollouts), rel_tol=1e-5) for name, total in sums.items() if name in rollouts)
    assert all(total == 0 for name, total in sums.items() if name not in rollouts)


@given(batches(), st.data())
def test_cutting_a_rollout_into_rows_leaves_every_rollouts_weight(batch, data):
    """
    whole   x x x x x x        mask as it is
    first   x x x              the same tokens, the first part trained
    second  . . . x x x        the rest, the first part shared (mask 0)
    """
    made, limits = batch
    cut = []
    for each in made:
        at = data.draw(st.integers(0, len(each.mask)))
        is_first_part = np.arange(len(each.mask)) < at
        for index, keep in enumerate((is_first_part, ~is_first_part)):
            mask = (each.mask.astype(bool) & keep).astype(np.uint8)
            cut.append(
                row(int(each.token_ids[0]) // 1000, mask, int(each.key.rollout_id[1:]), 2 * each.key.row + index)
            )

    def weights(rows):
        sums: dict[str, float] = {}
        for one, weight in zip(rows, row_weights(rows, limits["aggregation"]), strict=True):
            sums[one.key.rollout_id] = sums.get(one.key.rollout_id, 0.0) + float(weight.sum())
        return sums

    full_weights, parts = weights(made), weights(cut)
    assert full_weights.keys() == parts.keys()
    assert all(math.isclose(full_weights[name], parts[name], rel_tol=1e-5) for name in full_weights)


def test_a_worked_example():
    """
    rows    r0: 0 1 1   r1: 0 0 1 1 1 0   r2 is a second row of r0: 0 1      (mask)
    weight  token_mean  1/6 each;  rollout_mean  r0 1/6 each of its 3, r1 1/6 each of its 3
    """
    made = [row(0, [0, 1, 1]), row(1, [0, 0, 1, 1, 1, 0]), row(2, [0, 1], rollout=0, row_part=1)]
    for aggregation in ("token_mean", "rollout_mean"):
        assert [w.tolist() for w in row_weights(made, aggregation)] == [
            pytest.approx([0, 1 / 6, 1 / 6]),
            pytest.approx([0, 0, 1 / 6, 1 / 6, 1 / 6, 0]),
            pytest.approx([0, 1 / 6]),
        ]
    made[1] = row(1, [0, 0, 1, 0, 0, 0])
    assert row_weights(made, "rollout_mean")[1].tolist() == pytest.approx([0, 0, 1 / 2, 0, 0, 0])
    assert row_weights(made, "token_mean")[1].tolist() == pytest.approx([0, 0, 1 / 4, 0, 0, 0])


def test_supervised_batches_may_weigh_the_context():
    """
    mask     0 0 1 1     demonstrated d, observed o: o o d d
    weight   0 c 1/2 1/2 with c = 0.3, the only context token that something comes before
    """
    made = [row(0, [0, 0, 1, 1], provenance=Provenance.DEMONSTRATED)]
    batch = pack_rows(made, data_parallel_size=1, tokens_per_micro=8, pad_id=PAD, kind="sft", context_weight=0.3)
    micro = batch.micro[0][0]
    assert micro.weight_L[:5].tolist() == pytest.approx([0, 0.3, 0.5, 0.5, 0])
    assert micro.mask_L.nonzero()[:, 0].tolist() == [1, 2, 3]
    assert micro.advantages_L.eq(0).all()
    check_provenance(batch)


def test_the_context_is_refused_outside_supervised_batches():
    with pytest.raises(ValueError, match=r"context_weight=0\.3 .*only kind='sft'"):
        packed([row(0, [0, 1])], context_weight=0.3)


@pytest.mark.parametrize("name", ["data_parallel_size", "tokens_per_micro"])
def test_limits_below_1_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        packed([row(0, [0, 1])], **{name: 0})


def test_advantages_by_rollout_by_row_and_by_token():
    made = [row(0, [0, 1, 1]), row(1, [0, 1, 1])]
    by_rollout = tokens(packed(made, {"r0": 0.5, "r1": -2.0}))
    assert [by_rollout[token][3] for token in (0, 1, 2, 1000, 1001, 1002)] == [0, 0.5, 0.5, 0, -2, -2]
    by_token = tokens(packed(made, {made[0].key: np.array([9, 1, 2], np.float32), made[1].key: 3.0}))
    assert [by_token[token][3] for token in (0, 1, 2, 1000, 1001, 1002)] == [0, 1, 2, 0, 3, 3]
    with pytest.raises(KeyError, match="r1"):
        packed(made, {"r0": 0.5})


def test_rounding_up_to_the_shares_splits_groups_before_it_adds_empty_ones():
    made = [row(number, [0, 1] * 8) for number in range(3)]
    batch = packed(made, data_parallel_size=2, tokens_per_micro=1024)
    assert [[len(micro.keys) for micro in share] for share in batch.micro] == [[2], [1]]
    alone = packed(made[:1], data_parallel_size=2)
    assert [[len(micro.keys) for micro in share] for share in alone.micro] == [[1], [0]]
    empty = alone.micro[1][0]
    assert empty.token_ids_L.shape == (MULTIPLE,)
    assert empty.weight_L.sum() == 0
    assert empty.row_L.eq(-1).all()


def test_experts_of_many_rows_are_at_their_tokens():
    """Of every third row the experts are not known; those of token ``i`` of row ``r`` are ``(r + i) % 100``."""
    rows = []
    for number in range(200):
        size = 3 + number % 5
        experts = ((number + np.arange(size)) % 100).astype(np.uint8).reshape(size, 1, 1)
        rows.append(dataclasses.replace(row(number, [0, *[1] * (size - 1)]), experts=experts if number % 3 else None))
    for micro in packed(rows, tokens_per_micro=300).micro[0]:
        assert micro.experts_L is not None
        for token, experts in zip(micro.token_ids_L.tolist(), micro.experts_L[:, 0, 0].tolist(), strict=True):
            number, position = divmod(token, 1000)
            assert experts == ((number + position) % 100 if token != PAD and number % 3 else 255)
