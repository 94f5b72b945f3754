"""Packed rows with images: log-probabilities and gradients are those of transformers' own forward, one row after the other."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ConfigError, LearnerError
from agentrl.core.images import ImageSpan
from agentrl.core.types import Row, RowKey
from agentrl.learner.base import RankOptions, Role
from agentrl.learner.fsdp.rank import FsdpRank
from agentrl.learner.in_process import LocalCritic, LocalLearnerGroup
from tests.algo_config import make_algo
from tests.batches import pack_rows
from tests.integration.rank_processes import STEP_TIMEOUT_S, check_timeouts, run_ranks
from tests.integration.two_ranks import batch_of_share
from tests.unit.learner.image_rows import (
    IMAGES,
    TOWERS,
    batch,
    critic_folder,
    episodes,
    folder,
    own_logprobs,
    picture,
    processor,
    without_sampled_pads,
)
from tests.unit.learner.learners import Learners, gradients, make_rows, tensors
from tests.vision_folders import FAMILIES

FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def opened():
    learners = Learners(Path())
    yield learners
    learners.close()


@FAMILY
def test_logprobs_are_those_of_transformers_row_by_row(family, opened):
    rows = without_sampled_pads(family, episodes(family))
    expected = own_logprobs(family, rows)
    learner = opened.open(folder=folder(family))
    for share_prefixes in (False, True):
        packed = batch(rows, share_prefixes=share_prefixes)
        assert packed.micro[0][0].shares_prefixes == share_prefixes
        scores = learner.logprobs(packed)
        assert scores.keys() == expected.keys()
        for key, row_scores in scores.items():
            np.testing.assert_allclose(row_scores, expected[key], atol=2e-5)
    other = [replace(rows[3], images=tuple(replace(span, digest=picture(7).digest) for span in rows[3].images))]
    assert processor(family).expand(picture(7)) == processor(family).expand(picture(1))
    [other_scores] = learner.logprobs(batch(other)).values()
    assert np.abs(other_scores - expected[rows[3].key]).max() > 1e-3, "images make no difference"


@FAMILY
def test_gradients_do_not_depend_on_packing_or_shared_prefixes(family, opened):
    rows = episodes(family)
    learner = opened.open(folder=folder(family))
    batches = [batch(rows), batch(rows, share_prefixes=True), batch(rows, tokens=8)]
    assert [len(made.micro[0]) for made in batches] == [1, 1, len(rows)]
    together, shared, alone = (gradients(learner, made, torch.float32) for made in batches)
    assert any(".patch_embed" in name or "patch_embedding" in name for name in together)
    for name, gradient in together.items():
        assert gradient.isfinite().all()
        scale = max(float(gradient.abs().max()), 1e-3)
        for other in (shared, alone):
            torch.testing.assert_close(other[name] / scale, gradient / scale, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen3-vl", "smolvlm"])
def test_recomputation_changes_no_gradient(family, opened):
    rows = episodes(family)[1:4]
    by_mode = []
    for recompute in ("none", "full"):
        learner = opened.open(folder=folder(family), recompute=recompute)
        by_mode.append(gradients(learner, batch(rows), torch.float32))
    for name, gradient in by_mode[0].items():
        torch.testing.assert_close(by_mode[1][name], gradient, atol=1e-6, rtol=1e-5)


@FAMILY
def test_a_frozen_tower_stays_equal_and_weights_have_the_names_of_the_folder(family, opened):
    learner = opened.open(folder=folder(family), freeze=[TOWERS[family]])
    before, files = tensors(learner), load_file(folder(family) / "model.safetensors")
    assert before.keys() == files.keys()
    assert all(torch.equal(before[name].float(), files[name]) for name in files)
    learner.train_step(batch(episodes(family)))
    after = tensors(learner)
    tower = {name for name in before if TOWERS[family].strip("*.") in name}
    assert tower
    assert all(torch.equal(before[name], after[name]) for name in tower)
    assert any(not torch.equal(before[name], after[name]) for name in before.keys() - tower)


def test_a_rank_runs_the_code_of_image_processors_only_if_it_is_trusted(opened):
    path = folder("qwen2.5-vl")
    group = opened.open(folder=path)
    assert not group.rank.model.images.trust_remote_code
    trusting = FsdpRank(
        RankOptions(path, group.rank.config, make_algo(), torch.device("cpu"), 0, path, trust_remote_code=True)
    )
    with trusting.reference.model() as reference:
        assert trusting.model.images.trust_remote_code
        assert reference.images.trust_remote_code


CRITIC = "critic"
"""Name of the case of a critic."""
Cases = dict[str, tuple[str, dict[str, object], list[GlobalBatch]]]
"""By name: family, options of the learner, and the batches of its steps."""


def sharded_rank() -> int:
    """Be one of several ranks, which take the steps of each case."""
    path, number = Path(sys.argv[1]), int(sys.argv[2])
    ranks, cases = pickle.loads((path / "cases").read_bytes())
    dist.init_process_group("gloo", store=dist.FileStore(str(path / "store"), ranks), rank=number, world_size=ranks)
    results = {}
    for case, (family, options, batches) in cases.items():
        options = {**options, "step_timeout_s": STEP_TIMEOUT_S}
        config = LearnerConfig(precision="float32", device="cpu", threads=1, ranks=ranks, **options)
        role: Role = "critic" if case == CRITIC else "policy"
        model = path / (CRITIC if case == CRITIC else family)
        rank = FsdpRank(RankOptions(model, config, algo_of_case(case), torch.device("cpu"), seed=0, role=role))
        check_timeouts()
        for index, whole in enumerate(batches):
            rank_batch = batch_of_share(whole, rank.data_parallel_rank)
            by_name: dict[str, torch.Tensor] = {}

            def keep(lr_scale: float, into=by_name, rank=rank) -> dict[str, float]:
                for name, parameter in rank.model.hf.named_parameters():
                    if parameter.grad is not None:
                        into[name] = parameter.grad.full_tensor().clone()
                return {}

            rank._update = keep
            rank.train_step(rank_batch)
            results[case, index] = by_name, rank.logprobs(rank_batch, rank.name)
    (path / f"results{number}").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()
    return 0


def algo_of_case(case: str) -> AlgoConfig:
    return make_algo(advantage={"name": "gae"}) if case == CRITIC else make_algo()


def open_case(case: str, opened: Learners, family: str, options: dict[str, object]) -> LocalLearnerGroup | LocalCritic:
    """Open a single rank that computes what those of a case do."""
    if case != CRITIC:
        return opened.open(folder=folder(family), freeze=options.get("freeze", []))
    opened.close()
    config = LearnerConfig(precision="float32", device="cpu", threads=1)
    return LocalCritic(critic_folder(family), config, algo_of_case(case), seed=0)


def check_ranks(path: Path, opened: Learners, ranks: int, cases: Cases) -> None:
    """Compare gradients and log-probabilities of all ranks with those of a single one."""
    for family in {family for family, _, _ in cases.values()}:
        (path / family).symlink_to(folder(family))
    if CRITIC in cases:
        (path / CRITIC).symlink_to(critic_folder(cases[CRITIC][0]))
    (path / "cases").write_bytes(pickle.dumps((ranks, cases)))
    run_ranks(f"{__name__}:sharded_rank", path, ranks, timeout_s=90 * ranks)
    results = [pickle.loads((path / f"results{number}").read_bytes()) for number in range(ranks)]
    for case, (family, options, batches) in cases.items():
        learner = open_case(case, opened, family, options)
        for index, whole in enumerate(batches):
            joined = replace(whole, micro=(tuple(micro for micros in whole.micro for micro in micros),))
            expected_scores = learner.values(joined) if case == CRITIC else learner.logprobs(joined)
            scores = {key: values for result in results for key, values in result[case, index][1].items()}
            assert scores.keys() == expected_scores.keys()
            for key, row_scores in scores.items():
                np.testing.assert_allclose(row_scores, expected_scores[key], atol=1e-5, err_msg=case)
            expected, actual = gradients_of_trained(learner, joined), results[0][case, index][0]
            assert actual.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(actual[name], gradient, atol=2e-5, rtol=1e-3, msg=f"{case}: {name}")


def copies(row: Row, count: int) -> list[Row]:
    """Return a row under several names."""
    return [replace(row, key=RowKey("p", f"copy {number}")) for number in range(count)]


def test_two_ranks_of_which_one_has_pictures_have_the_gradient_of_one_rank(tmp_path, opened):
    cases: Cases = {}
    for family in ("qwen3-vl", "smolvlm"):
        rows = episodes(family)
        steps = [[rows[0], rows[4]], copies(rows[4], 2)]
        cases[family] = family, {}, [batch(step, tokens=8, ranks=2) for step in steps]
        assert [[bool(m.images) for m in ms] for ms in cases[family][2][0].micro] == [[True], [False]]
    cases["frozen"] = "qwen3-vl", {"freeze": [TOWERS["qwen3-vl"]]}, cases["qwen3-vl"][2][:1]
    whole_rows = [batch(episodes("qwen3-vl"), share_prefixes=share) for share in (False, True)]
    cases["context"] = "qwen3-vl", {"context_parallel": 2}, whole_rows
    returns = {made.key: np.full(len(made.mask), 0.5, np.float32) for made in rows}
    sizes = {"tokens_per_micro": 8, "data_parallel_size": 2, "pad_id": 0}
    values = pack_rows([rows[0], rows[4]], kind="value", returns=returns, values=returns, images=IMAGES, **sizes)
    cases[CRITIC] = "smolvlm", {}, [values]
    check_ranks(tmp_path, opened, 2, cases)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_four_ranks_with_pictures_have_the_gradient_of_one_rank(tmp_path, opened):
    """Sharded over all, in two copies, with parts of rows, and with divided experts."""
    cases: Cases = {}
    for family in ("qwen2.5-vl", "qwen3-vl"):
        rows = episodes(family)
        one_sided = batch([rows[0], *copies(rows[4], 3)], tokens=8, ranks=4)
        assert sorted(any(micro.images for micro in micros) for micros in one_sided.micro) == [False] * 3 + [True]
        cases[family] = family, {}, [one_sided, batch(rows, tokens=8, ranks=4)]
        cases[f"{family}, two copies"] = family, {"replicas": 2}, [one_sided]
        context = {"context_parallel": 2}
        cases[f"{family}, parts of rows"] = family, context, [batch(rows, tokens=8, ranks=2)]
    glm = episodes("glm-4.5v")
    cases["experts"] = "glm-4.5v", {"expert_parallel": 2}, [batch([*glm[:3], glm[4]], tokens=8, ranks=4)]
    check_ranks(tmp_path, opened, 4, cases)


def gradients_of_trained(learner, whole: GlobalBatch) -> dict[str, torch.Tensor]:
    """Return the gradients of a batch by weight, of those that have one."""
    by_name: dict[str, torch.Tensor] = {}

    def keep(lr_scale: float) -> dict[str, float]:
        for name, parameter in learner.rank.model.hf.named_parameters():
            if parameter.grad is not None:
                by_name[name] = parameter.grad.clone()
        return {}

    learner.rank._update = keep
    learner.train_step(whole)
    return by_name


def test_images_for_a_model_that_reads_none_are_refused(model, opened):
    made = make_rows((20,))[0]
    made = replace(made, images=(ImageSpan(1, 2, picture(0).digest),))
    learner = opened.open(folder=model)
    with pytest.raises(LearnerError, match=r"reads none; set model.path to a vision-language model"):
        learner.logprobs(batch([made]))


def test_adapters_are_of_the_text_part_alone(opened):
    learner = opened.open(folder=folder("qwen3-vl"), lora={"rank": 2, "alpha": 4})
    before = tensors(learner)
    names = [name for name, parameter in learner.rank.model.hf.named_parameters() if parameter.requires_grad]
    assert names
    assert all(".language_model." in name for name in names)
    learner.train_step(batch(episodes("qwen3-vl")))
    after = tensors(learner)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if ".language_model.layers." in name and name.endswith("_proj.weight")
    }
    with pytest.raises(ConfigError, match="matches no linear layer"):
        opened.open(folder=folder("qwen3-vl"), lora={"rank": 2, "alpha": 4, "target": ["*.visual.*"]})
