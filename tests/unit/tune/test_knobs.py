"""What is tried of which configuration on which machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.models.resolve import resolve_model
from agentrl.tune.knobs import Machine, knobs
from agentrl.tune.resolve import check_memory
from agentrl.tune.search import Settings
from agentrl.tune.trial_process import HotSettings

LAPTOP = Machine(cores=2, gpus=0)
NODE = Machine(cores=64, gpus=8)
GPU = ["sampler.backend=sglang", "learner.device=cuda"]


def choices_of(settings: Sequence[str], machine: Machine = NODE) -> dict[str, Sequence[Sequence[Settings]]]:
    """Return the directions of each knob."""
    config = load_config(None, settings)
    return {knob.name: knob.choices(config) for knob in knobs(config, machine)}


def values(directions: Sequence[Sequence[Settings]]) -> list[list[Any]]:
    return [[next(iter(settings.values())) for settings in direction] for direction in directions]


def test_the_knobs_of_a_laptop() -> None:
    choices = choices_of(["rollout.batch_size=8", "rollout.n_samples_per_prompt=8", "rollout.concurrency=16"], LAPTOP)
    assert {name: values(directions) for name, directions in choices.items()} == {
        "rollout.concurrency": [[32, 64], [8, 4]],
        "batch.tokens_per_micro": [[8192, 16384], [2048, 1024]],
        "sampler.embedded.threads": [[], [1]],
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["rollout.concurrency=256"], [[], [128, 64]]),  # all at once already
        (["rollout.concurrency=96"], [[192, 256], [48, 24]]),
        (["rollout.concurrency=96", "sampler.embedded.slots=128"], [[128], [48, 24]]),  # more would wait in the engine
    ],
)
def test_no_more_episodes_at_the_same_time_than_a_step_and_the_engines_have(
    settings: list[str], expected: list[Any]
) -> None:
    assert values(choices_of(settings, LAPTOP)["rollout.concurrency"]) == expected


def test_speculation_is_tried_with_as_many_requests_as_an_engine_has() -> None:
    [direction] = choices_of([*GPU, "sampler.engines=2"])["speculative decoding"]
    assert direction[0] == {
        "sampler.sglang.speculative_algorithm": "NGRAM",
        "sampler.sglang.speculative_ngram_max_bfs_breadth": 1,
        "sampler.sglang.max_running_requests": 128,
        "sampler.sglang.speculative_num_draft_tokens": 4,
    }
    running = [
        *GPU,
        "sampler.sglang={speculative_algorithm: NGRAM, speculative_num_draft_tokens: 8, max_running_requests: 64}",
    ]
    assert values(choices_of(running)["speculative decoding"]) == [[16], [4], [None]]
    eagle = [*GPU, "sampler.sglang={speculative_algorithm: EAGLE, speculative_num_draft_tokens: 4}"]
    assert values(choices_of(eagle)["speculative decoding"]) == [[5, 7], [2], [None]], (
        "steps of the draft, one less than tokens"
    )
    assert "speculative decoding" not in choices_of([*GPU, "sampler.sglang.device=cpu"])
    assert "speculative decoding" not in choices_of([*GPU, "sampler.url=http://a:1"]), "a running engine stays as it is"


def test_gpus_are_split_otherwise_and_shared() -> None:
    split = [*GPU, "placement.mode=disaggregate", "learner.ranks=4", "sampler.engines=2", "sampler.sglang.tp_size=2"]
    more, fewer, shared = choices_of(split)["GPUs of learner and engines"]
    assert more == [{"learner.ranks": 2, "sampler.engines": 3}], "four engines would leave no GPU"
    assert fewer == [{"learner.ranks": 6, "sampler.engines": 1}]
    assert shared == [
        {"learner.ranks": 8, "sampler.engines": 4, "placement.mode": "colocate", "weights.transport": "ipc"}
    ]
    colocated = [*GPU, "placement.mode=colocate", "learner.ranks=8", "sampler.engines=8"]
    assert choices_of(colocated)["GPUs of learner and engines"] == [
        [
            {
                "learner.ranks": 4,
                "sampler.engines": 4,
                "placement.mode": "disaggregate",
                "weights.transport": "distributed",
            }
        ]
    ]
    assert "GPUs of learner and engines" not in choices_of([*split, "algo.advantage.name=gae"])


def test_engines_on_the_only_gpu_divide_its_memory() -> None:
    one_gpu, shared = Machine(cores=16, gpus=1), [*GPU, "sampler.sglang={mem_fraction_static: 0.3}"]
    more, fewer = choices_of(shared, one_gpu)["engines on the GPU"]
    assert more == [
        {"sampler.engines": 2, "sampler.sglang.mem_fraction_static": 0.15},
        {"sampler.engines": 3, "sampler.sglang.mem_fraction_static": 0.1},
    ]
    assert fewer == []
    two = [*GPU, "sampler.engines=2", "sampler.sglang={mem_fraction_static: 0.15, max_total_tokens: 3000}"]
    more, fewer = choices_of(two, one_gpu)["engines on the GPU"]
    assert [settings["sampler.sglang.max_total_tokens"] for settings in (*more, *fewer)] == [2000, 1500, 6000]
    assert fewer[0]["sampler.engines"] == 1
    for settings, machine in ((shared, NODE), (GPU, one_gpu), ([*shared, "placement.mode=colocate"], one_gpu)):
        assert "engines on the GPU" not in choices_of(settings, machine)


@pytest.mark.parametrize("base", [[], GPU, [*GPU, "placement.mode=disaggregate"], ["async.max_staleness=2"]])
def test_nothing_is_tried_that_changes_what_is_learned(base: list[str]) -> None:
    """The keys that differ are of speed, and every choice is a valid configuration."""
    allowed = (
        "rollout.concurrency", "rollout.runners", "batch.tokens_per_micro", "learner.ranks", "learner.recompute",
        "placement.mode", "weights.transport", "async.streaming", "sampler.engines", "sampler.sglang", "sampler.embedded.threads",
    )  # fmt: skip
    config = load_config(None, base)
    seen = 0
    for knob in knobs(config, NODE):
        for direction in knob.choices(config):
            for settings in direction:
                seen += 1
                assert all(key.startswith(allowed) for key in settings), settings
    assert seen > 4


def test_hot_settings_are_those_that_need_no_start() -> None:
    def keys(*settings: str) -> Any:
        config = load_config(None, ["rollout.runners=0", *settings])
        return HotSettings.from_config(config).other_keys(config)

    assert keys() == keys("rollout.concurrency=8", "batch.tokens_per_micro=8", "run.dir=x")
    assert keys() != keys("sampler.embedded.threads=1")
    for restarts in ("async.max_staleness=1", "rollout.runners=2"):
        assert keys(restarts) != keys(restarts, "rollout.concurrency=8")
        assert keys(restarts) == keys(restarts, "batch.tokens_per_micro=8")


def test_a_learner_that_needs_more_than_a_gpu_by_the_estimate_is_refused() -> None:
    """The shipped policy of 1.9 million weights: 29 MiB of weights, gradients and moments, and logits of each token."""
    config = load_config(None, ["learner.device=cuda", "batch.tokens_per_micro=1000000"])
    with pytest.raises(ConfigError, match=r"the learner would need about .* GiB of 0\.9 GiB of a GPU"):
        check_memory(config, resolve_model("multihop-warm"), 2**30)
    check_memory(config, resolve_model("multihop-warm"), 2**40)
