import math
from dataclasses import replace

import numpy as np
import pytest

from agentrl.batch.bench import bench_masks
from agentrl.batch.packing import pack
from agentrl.batch.provenance import check_batch, check_rows
from agentrl.errors import ProvenanceError
from agentrl.types import MaskReason, Provenance, Row, RowKey


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
def test_rows_and_batches_that_train_on_what_nobody_sampled_are_refused(field, value, words):
    made = [row(), broken(field, value)]
    match = f"token 3 \\(id 13\\) of row 0 of rollout 'bad'.*{words}"
    with pytest.raises(ProvenanceError, match=match):
        check_rows(made)
    with pytest.raises(ProvenanceError, match=match):
        check_batch(pack(made, {"r0": 1.0, "bad": 1.0}, ranks=1, tokens_per_bin=32, tokens_per_micro=32, pad_id=0))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("requests", 1, "no request"), ("mask_reason", MaskReason.STALE, "disagree"), ("mask", 0, "disagree")],
)
def test_rows_that_contradict_themselves_are_refused(field, value, words):
    with pytest.raises(ProvenanceError, match=f"token 3 .*{words}"):
        check_rows([row(), broken(field, value)])


def test_good_rows_and_batches_pass():
    check_rows([row()])
    check_batch(pack([row()], {"r0": 1.0}, ranks=2, tokens_per_bin=32, tokens_per_micro=32, pad_id=0))


def test_padding_may_not_be_trained_on():
    batch = pack([row()], {"r0": 1.0}, ranks=1, tokens_per_bin=32, tokens_per_micro=32, pad_id=0)
    micro = batch.micro[0][0]
    for name, value in (("mask", True), ("provenance", 1), ("versions", 0), ("requests", 0)):
        getattr(micro, f"{name}_R_L")[0, 6] = value
    with pytest.raises(ProvenanceError, match="padded place may not be trained on: it is padding"):
        check_batch(batch)


def test_supervised_batches_are_not_held_to_it():
    made = replace(row(), provenance=np.array([0, 0, 2, 2], np.uint8))
    batch = pack([made], ranks=1, tokens_per_bin=32, tokens_per_micro=32, pad_id=0, kind="sft")
    check_batch(batch)
    batch.kind = "rl"
    with pytest.raises(ProvenanceError, match="no engine sampled it"):
        check_batch(batch)


def test_the_benchmark_counts_every_token():
    figures = bench_masks(lambda: [row(), row("r1")], tokens_per_bin=32, tokens_per_micro=32)
    assert figures.tokens == 8
    assert 0 < figures.tokens_per_s < min(figures.pack_tokens_per_s, figures.check_tokens_per_s)
