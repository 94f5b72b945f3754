import math
from dataclasses import replace

import numpy as np
import pytest

from agentrl.batch.provenance import check_graded, check_provenance, check_rows
from agentrl.config.load import load_config
from agentrl.core.errors import ProvenanceError, UngradedError
from agentrl.core.types import MaskReason, Provenance, Rollout, Row, RowKey, StopReason
from benchmarks.masks import bench_masks
from tests.batches import pack_rows, training_step


def row(name="r0"):
    """``o o s s``"""
    return Row(
        key=RowKey("p", name),
        token_ids=np.array([10, 11, 12, 13], np.int32),
        provenance=np.array([0, 0, 1, 1], np.uint8),
        mask=np.array([0, 0, 1, 1], np.uint8),
        mask_reason=np.array([1, 1, 0, 0], np.uint8),
        logprobs=np.array([0, 0, -0.5, -0.5], np.float32),
        versions=np.array([-1, -1, 3, 3], np.int32),
        requests=np.array([-1, -1, 0, 0], np.int32),
        request_ids=("q",),
    )


FAULTS = [
    ("provenance", Provenance.OBSERVED, "no engine sampled it"),
    ("provenance", Provenance.DEMONSTRATED, "no engine sampled it"),
    ("logprobs", math.nan, "log-probability"),
    ("logprobs", -math.inf, "log-probability"),
    ("logprobs", 0.5, "log-probability"),
    ("versions", -1, "no policy version"),
    ("requests", -1, "no request"),
]


def broken(field, value):
    array = getattr(row(), field).copy()
    array[3] = value
    return replace(row("bad"), **{field: array})


@pytest.mark.parametrize(("field", "value", "words"), FAULTS)
def test_rows_and_batches_that_train_on_tokens_that_were_not_sampled_are_refused(field, value, words):
    made = [row(), broken(field, value)]
    match = f"token 3 \\(id 13\\) of row 0 of rollout 'bad'.*{words}"
    with pytest.raises(ProvenanceError, match=match):
        check_rows(made)
    with pytest.raises(ProvenanceError, match=f"{match}.*train.provenance=warn"):
        check_provenance(pack_rows(made, {"r0": 1.0, "bad": 1.0}, data_parallel_size=1, tokens_per_micro=32, pad_id=0))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("requests", 1, "no request"), ("mask_reason", MaskReason.STALE, "disagree"), ("mask", 0, "disagree")],
)
def test_rows_that_contradict_themselves_are_refused(field, value, words):
    with pytest.raises(ProvenanceError, match=f"token 3 .*{words}"):
        check_rows([row(), broken(field, value)])


def test_good_rows_and_batches_pass():
    check_rows([row()])
    check_provenance(pack_rows([row()], {"r0": 1.0}, data_parallel_size=2, tokens_per_micro=32, pad_id=0))


def test_padding_may_not_be_trained_on():
    batch = pack_rows([row()], {"r0": 1.0}, data_parallel_size=1, tokens_per_micro=32, pad_id=0)
    micro = batch.micro[0][0]
    for name, value in (("mask", True), ("provenance", 1), ("versions", 0), ("requests", 0)):
        getattr(micro, f"{name}_L")[6] = value
    with pytest.raises(ProvenanceError, match="padded place may not be trained on: it is padding"):
        check_provenance(batch)


@pytest.mark.parametrize(("field", "value", "words"), FAULTS)
def test_a_warning_leaves_out_only_tokens_that_were_not_sampled(field, value, words, caplog):
    """
    mask   good o o s s    bad o o s x     x is at fault: s keeps its share of the four tokens, x has none
    """
    made = [row(), broken(field, value)]
    options = {"data_parallel_size": 1, "tokens_per_micro": 32, "pad_id": 0}
    rows = pack_rows(made, {"r0": 1.0, "bad": 1.0}, **options)
    batch = pack_rows(made, {"r0": 1.0, "bad": 1.0}, **options, provenance="warn")
    (record,) = caplog.records
    first = "1 tokens are left out of the loss (train.provenance=warn). The first: token 3 (id 13) of row 0 of rollout 'bad', "
    assert record.message.startswith(f"{first}agent 'main' may not be trained on: ")
    assert words in record.message
    assert batch.metrics["train/provenance_faults"] == 1.0
    ((micro,),), ((full_micro,),) = batch.micro, rows.micro
    changed = full_micro.mask_L & ~micro.mask_L
    assert changed.sum() == 1
    assert micro.token_ids_L[changed].tolist() == [13]
    assert [key.rollout_id for key in [micro.keys[int(micro.row_L[changed])]]] == ["bad"]
    assert micro.weight_L[changed].item() == micro.advantages_L[changed].item() == 0
    assert micro.weight_L[~changed].equal(full_micro.weight_L[~changed])
    check_provenance(batch)
    with pytest.raises(ProvenanceError, match=r"train\.provenance=warn"):
        check_provenance(rows)
    micro.mask_L[changed] = True
    with pytest.raises(ProvenanceError, match=words):
        check_provenance(batch)


def test_good_rows_are_packed_alike_under_both_rules(caplog):
    options = {"data_parallel_size": 1, "tokens_per_micro": 32, "pad_id": 0}
    for rule in ("strict", "warn"):
        batch = pack_rows([row()], {"r0": 1.0}, **options, provenance=rule)
        assert batch.metrics["train/provenance_faults"] == 0.0
        assert batch.micro[0][0].weight_L.sum() == 1
    assert not caplog.records


def test_rows_of_another_temperature_are_refused():
    options = {"data_parallel_size": 1, "tokens_per_micro": 32, "pad_id": 0}
    made = [row(), replace(row("warm"), temperature=0.7)]
    words = r"row 0 of rollout 'warm'.* at temperature 0\.7, .*sampler\.temperature=1:"
    with pytest.raises(ProvenanceError, match=words):
        pack_rows(made, {"r0": 1.0, "warm": 1.0}, **options)
    with pytest.raises(ProvenanceError, match=r"rollout 'r0'.* at temperature 1, .*sampler\.temperature=0\.7"):
        pack_rows(made, {"r0": 1.0, "warm": 1.0}, **options, temperature=0.7)
    assert pack_rows(made[1:], {"warm": 1.0}, **options, temperature=0.7).temperature == 0.7
    assert pack_rows(made, **options, kind="sft").metrics["batch/rows"] == 2, (
        "demonstrations have no sampling temperature"
    )


def test_supervised_batches_are_not_held_to_it():
    made = replace(row(), provenance=np.array([0, 0, 2, 2], np.uint8))
    batch = pack_rows([made], data_parallel_size=1, tokens_per_micro=32, pad_id=0, kind="sft")
    assert "train/provenance_faults" not in batch.metrics
    check_provenance(batch)
    with pytest.raises(ProvenanceError, match="no engine sampled it"):
        check_provenance(replace(batch, kind="rl"))


def test_the_benchmark_counts_every_token():
    times = bench_masks(lambda: [row(), row("r1")], tokens_per_micro=32)
    assert times.tokens == 8
    assert 0 < times.tokens_per_s < min(times.pack_tokens_per_s, times.check_tokens_per_s)


def rollout(reward=1.0, **fields):
    return Rollout("p", "r0", [row()], reward, StopReason.TERMINATED, **fields)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (rollout(math.nan), "it has the reward nan"),
        (rollout(math.inf), "it has the reward inf"),
        (rollout(-math.inf), "it has the reward -inf"),
        (rollout(0.0, graded=False), "it has no reward, as its grader never returned"),
    ],
)
def test_rollouts_without_a_final_finite_reward_are_refused(made, words):
    with pytest.raises(
        UngradedError, match=f"rollout 'r0' of task 'p' may not be trained on: {words}.*reward.function"
    ):
        check_graded([rollout(), made])
    with pytest.raises(UngradedError):
        _ = training_step(load_config(None, []), [rollout(), made]).groups
    check_graded([rollout(), replace(made, dropped=True)])
