"""Images of rows in batches. Rows are written as texts: ``o`` observed, ``s`` sampled, a letter in upper case the token of
an image."""

import pickle
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch.groups import group_rollouts
from agentrl.batch.prefix_tree import key_ids, prefix_tree, token_keys
from agentrl.batch.provenance import check_provenance, check_rows
from agentrl.core.errors import ProvenanceError
from agentrl.core.images import Image, ImageSpan
from agentrl.core.types import MaskReason, Provenance, Rollout, Row, RowKey, StopReason
from tests.batches import pack_rows

PAD, IMAGE = 0, 7
IMAGES = {name: Image(b"\x89PNG\r\n\x1a\n" + name.encode()) for name in "ABCDE"}
BY_DIGEST = {image.digest: image for image in IMAGES.values()}


def row(text, rollout="r0"):
    """Return the row of a text; its first token is 1, so that equal beginnings are equal prefixes."""
    sampled = np.array([letter == "s" for letter in text])
    runs = [(name, [at for at, _ in run]) for name, run in groupby(enumerate(text), lambda item: item[1])]
    return Row(
        key=RowKey("p", rollout),
        token_ids=np.array([IMAGE if letter.isupper() else 1 + at for at, letter in enumerate(text)], np.int32),
        provenance=np.where(sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=sampled.astype(np.uint8),
        mask_reason=np.where(sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        requests=np.where(sampled, 0, -1).astype(np.int32),
        request_ids=("q",),
        images=tuple(ImageSpan(at[0], len(at), IMAGES[name].digest) for name, at in runs if name.isupper()),
    )


def packed(texts, **options):
    rows = [row(text, f"r{number}") for number, text in enumerate(texts)]
    options = {"tokens_per_micro": 64, "pad_id": PAD, "images": BY_DIGEST} | options
    return rows, pack_rows(rows, {made.key: 1.0 for made in rows}, **options)


TEXTS = st.lists(st.lists(st.sampled_from(["o", "oo", "s", "AA", "BBB", "C"]), min_size=1, max_size=8), max_size=8)


@given(TEXTS, st.integers(1, 3), st.booleans(), st.sampled_from([8, 32, 200]))
def test_packing_loses_no_image_and_shifts_its_tokens_with_their_row(pieces, ranks, share, tokens):
    texts = ["o" + "".join(parts) + "s" for parts in pieces]
    rows, batch = packed(texts, data_parallel_size=ranks, share_prefixes=share, tokens_per_micro=tokens)
    check_provenance(batch)
    spans_by_row = {}
    for micro in (micro for micros in batch.micro for micro in micros):
        for placed in micro.images:
            place = slice(placed.span.start, placed.span.end)
            assert placed.image.digest == placed.span.digest
            assert (micro.token_ids_L[place] == IMAGE).all()
            [number] = {*micro.row_L[place].tolist()}
            in_row = replace(placed.span, start=int(micro.position_ids_L[place.start]))
            spans_by_row.setdefault(micro.keys[number], []).append(in_row)
        assert [placed.span.start for placed in micro.images] == sorted(p.span.start for p in micro.images)
        assert not (micro.mask_L & micro.image_mask_L).any()
    assert spans_by_row == {made.key: [*made.images] for made in rows if made.images}
    for at_once in zip(*batch.micro, strict=True):
        assert {micro.needs_vision for micro in at_once} == {any(micro.images for micro in at_once)}


def test_an_image_of_several_rows_is_pickled_once_a_rank():
    big = Image(b"\x89PNG\r\n\x1a\n" + bytes(50_000))
    rows = [replace(row("oAAs", f"r{n}"), images=(ImageSpan(1, 2, big.digest),)) for n in range(8)]
    batch = pack_rows(
        rows, {made.key: 1.0 for made in rows}, tokens_per_micro=32, images={big.digest: big}, data_parallel_size=2
    )
    for micros in batch.micro:
        assert sum(len(micro.images) for micro in micros) == 4
        assert len(pickle.dumps(micros)) < 1.5 * len(big.data)


def test_a_rank_gets_the_images_of_its_rows_alone():
    _, batch = packed(["oAAs", "oBBs"], data_parallel_size=2, tokens_per_micro=8)
    assert [{p.span.digest for p in micro.images} for [micro] in batch.micro] == [
        {IMAGES["A"].digest},
        {IMAGES["B"].digest},
    ]


def test_a_missing_image_is_an_error():
    with pytest.raises(KeyError):
        packed(["oAAs"], images={})


@pytest.mark.parametrize("texts", [("oAAss", "oBBss"), ("oAAsBs", "oAAsCs")])
def test_different_images_are_different_prefixes(texts):
    rows = [row(text) for text in texts]
    assert np.array_equal(rows[0].token_ids, rows[1].token_ids)
    digests = sorted(BY_DIGEST)
    keys = [token_keys(made.token_ids, made.images, digests) for made in rows]
    tree = prefix_tree(keys)
    common = next(at for at, pair in enumerate(zip(*texts, strict=True)) if len({*pair}) > 1)
    assert sorted(tree.shared) == [0, common]
    assert np.array_equal(key_ids(tree.token_ids_U)[tree.index_N], np.concatenate([r.token_ids for r in rows]))


def test_batches_share_prefixes_up_to_different_images_only():
    shared, different = "o" * 20 + "AAAA" + "s", "o" * 20 + "BBBB" + "s"
    _, batch = packed([shared, shared, different], share_prefixes=True, tokens_per_micro=200)
    assert batch.metrics["batch/shared_share"] == pytest.approx((25 + 20) / 75)
    assert batch.metrics["batch/image_share"] == pytest.approx(12 / 75)


def test_tokens_of_images_may_not_be_trained_on():
    bad = row("oAAs")
    for name, value in (("mask", 1), ("mask_reason", 0), ("provenance", 1), ("logprobs", -1), ("versions", 0)):
        getattr(bad, name)[2] = value
    bad.requests[2] = 0
    with pytest.raises(ProvenanceError, match=r"token 2 .*it stands for an image"):
        check_rows([bad])
    batch = pack_rows([bad], {bad.key: 1.0}, tokens_per_micro=32, images=BY_DIGEST)
    with pytest.raises(ProvenanceError, match=r"token 2 .*it stands for an image"):
        check_provenance(batch)
    warned = pack_rows([bad], {bad.key: 1.0}, tokens_per_micro=32, images=BY_DIGEST, provenance="warn")
    assert warned.metrics["train/provenance_faults"] == 1
    assert warned.micro[0][0].mask_L.nonzero()[:, 0].tolist() == [3]


def test_supervised_batches_train_on_no_image():
    made = row("ooAAos")
    batch = pack_rows([made], kind="sft", tokens_per_micro=32, images=BY_DIGEST, context_weight=0.5)
    assert batch.micro[0][0].weight_L[:6].tolist() == [0, 0.25, 0, 0, 0.25, 1]


def test_groups_have_the_images_of_their_rollouts():
    rollouts = [
        Rollout(
            f"r{n}", "p", [row(text, f"r{n}")], 1.0, StopReason.TERMINATED, images={IMAGES[name].digest: IMAGES[name]}
        )
        for n, (text, name) in enumerate([("oAs", "A"), ("oBs", "B")])
    ]
    assert group_rollouts(rollouts).images == {IMAGES[name].digest: IMAGES[name] for name in "AB"}
