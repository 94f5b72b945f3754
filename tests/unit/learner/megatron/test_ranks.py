"""Models on one rank and divided among two: weights read slice by slice and gathered bit for bit, logits of transformers.

All ranks are forks of one process; see `forked`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.learner.megatron.families.base import EMBEDDING
from agentrl.models.load import load_model
from tests.unit.learner.joining_engine import JoiningEngine
from tests.unit.learner.megatron.forked import Found, run_ranks
from tests.unit.learner.megatron.models import LAYOUTS, LENGTHS, MODELS, add_draft_layer, make_model, rows, weighted
from tests.unit.models.float8_folders import FORMS, quantize

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each model."""
    parent = tmp_path_factory.mktemp("megatron")
    for name in MODELS:
        make_model(parent / name, name)
    add_draft_layer(make_model(parent / "drafting", "deepseek_v3"))
    float8 = quantize(make_model(parent / "float8", "deepseek_v3"), FORMS["blocks"])
    save_file(float8, parent / "float8.safetensors")
    return parent


@pytest.fixture(scope="module")
def found(folder: Path, preloaded_children: str) -> Found:
    alone = {"one_rank": 1, "refused_options": 1, "router_losses": 1, "refused_folders": 1}
    return run_ranks(
        folder,
        preloaded_children,
        **alone,
        two_ranks=2,
        gradients=2,
        router_shares=2,
        compiled=2,
        senders=4,
        failed=2,
        distributed=2,
        distributed_alone=1,
        converted=0,
    )


@cache
def expected_logits(folder: Path) -> torch.Tensor:
    model = load_model(folder, attn_implementation="eager")
    with torch.no_grad():
        return torch.cat([model(ids[None]).logits[0] for ids in rows()[0].split(LENGTHS)])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_transformers(folder: Path, found: Found, name: str) -> None:
    wrong, logits = found["one_rank"][name]
    assert wrong == []
    assert torch.allclose(logits, expected_logits(folder / name), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_hold_the_same_model(folder: Path, found: Found, name: str) -> None:
    wrong, logits = found["two_ranks"][name]
    assert wrong == []
    if logits is not None:
        assert torch.allclose(logits, expected_logits(folder / LAYOUTS[name][0]), atol=1e-5, rtol=0)


def test_several_senders_split_no_pair_whatever_the_size_of_buckets(found: Found) -> None:
    """Each of two stages has a sender of its layers and two of experts, the first of which is the same rank."""
    result = found["senders"]
    streams = {ranks for rank in result["ranks"] for ranks in rank["streams"]}
    assert streams == {(0, 1), (2, 3), (0,), (1,), (2,), (3,)}
    assert [name for rank in result["ranks"] for name in rank["wrong"]] == []
    assert result["few"] == []
    for key in result["ranks"][0]["sent"]:
        buckets = [bucket for rank in result["ranks"] for bucket in rank["sent"][key]]
        engine = JoiningEngine(result["names"])
        for bucket in buckets:
            engine.load_weights(bucket)
        names = [name for bucket in buckets for name in bucket]
        assert len(names) == len({*names})
        if key[1] == "a":
            assert engine.names == {*result["names"]}, key
            assert all(rank["sent"][key] for rank in result["ranks"]), "each rank sends"
        else:
            changed = {name for name in result["names"] if "kv_a_proj_with_mqa" in name}
            assert changed
            assert engine.names == changed | {name.replace("kv_a_proj_with_mqa", "q_a_proj") for name in changed}, key


def test_ranks_together_have_the_gradient_of_transformers(folder: Path, found: Found) -> None:
    """Of gpt-oss: of sinks, of biases that ranks divide or have alike, and of stacked experts."""
    model = load_model(folder / "gpt_oss", attn_implementation="eager")
    weighted(torch.cat([model(ids[None]).logits[0] for ids in rows()[0].split(LENGTHS)])).backward()
    gradients = found["gradients"]
    gradients[EMBEDDING][0] = 0  # transformers gives padding's embedding no gradient
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert torch.allclose(gradients.pop(name), weight.grad, atol=1e-4 * float(weight.grad.abs().max())), name
    assert not gradients


def test_all_layers_are_compiled_as_the_same_graph(found: Found) -> None:
    assert found["compiled"] == {"graphs": 1, "error": 0.0}


def test_options_pass_through(found: Found) -> None:
    messages = found["refused_options"]
    assert messages["taken"] == "full 2"
    assert messages["recompute_method"].startswith("learner.megatron: Megatron-Core refuses these options: ")


def test_losses_of_routers_do_not_grow_with_the_number_of_tokens(found: Found) -> None:
    """The same rows once and 4 times have the same mean: 240 and 960 tokens, and micro-batches of half the weight."""
    for loss, norms in found["router_losses"].items():
        assert norms["1"] > 1e-3, loss
        assert norms["4"] == pytest.approx(norms["1"], rel=1e-4), loss
        assert norms["padded"] == pytest.approx(norms["1"], rel=1e-4), loss
        assert norms["half"] == pytest.approx(norms["1"] / 2, rel=1e-4), loss
        assert norms["expected"] == pytest.approx(norms["1"], rel=1e-4), loss


def test_losses_of_routers_do_not_depend_on_the_ranks_that_compute_the_micro_batches(found: Found) -> None:
    shares = found["router_shares"]
    assert shares["together"].norm() > 1e-3
    torch.testing.assert_close(shares["divided"], shares["together"])


def test_all_ranks_notice_that_one_could_not_write(found: Found) -> None:
    assert found["failed"] == [
        "LearnerError: FOLDER could not be written by rank 1: [Errno 28] no space left: 'FOLDER'",
        "OSError: [Errno 28] no space left: 'FOLDER'",
    ]


def test_one_rank_reads_distributed_checkpoints_of_two_with_stacked_experts_and_stages(found: Found) -> None:
    assert found["distributed_alone"] == {"gpt_oss": [], "mixtral": []}


def test_a_distributed_checkpoint_becomes_the_same_folder_again(found: Found) -> None:
    refused = "--ranks=5: set it to 1 to 4, the model's layers"
    assert found["converted"] == {"drafting": [], "qwen2": [], "float8": [], "refused": refused}


def test_folders_with_other_weights_are_refused(found: Found) -> None:
    assert found["refused_folders"] == {
        "missing": "1 weights cannot be read; model.norm.weight is missing",
        "shape": "1 weights cannot be read; model.norm.weight has the shape [7], not [32]",
        "integers": "1 weights cannot be read; model.norm.weight is quantised (int8)",
        "untied": "lm_head.weight differs from model.embed_tokens.weight, but config.json has tie_word_embeddings=true; "
        "set it to false",
    }
