"""docs/coming_from/slime.md has every documented option of slime, with a key that exists and a test that exists, or a reason."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.structure.layers import REPOSITORY

PAGE = (REPOSITORY / "docs" / "coming_from" / "slime.md").read_text()
CONFIGURATION = (REPOSITORY / "docs" / "reference" / "configuration.md").read_text()
WITHOUT = "What has no counterpart"
DOCUMENTED = frozenset(
    [
        "actor-num-gpus-per-node",
        "actor-num-nodes",
        "advantage-estimator",
        "allgather-cp",
        "apply-chat-template",
        "balance-data",
        "buffer-filter-path",
        "calculate-per-token-loss",
        "check-weight-update-equal",
        "colocate",
        "context-parallel-size",
        "custom-convert-samples-to-train-data-path",
        "custom-eval-rollout-log-function-path",
        "custom-generate-function-path",
        "custom-loss-function-path",
        "custom-megatron-before-log-prob-hook-path",
        "custom-megatron-before-train-step-hook-path",
        "custom-megatron-init-path",
        "custom-pg-loss-reducer-function-path",
        "custom-reward-post-process-path",
        "custom-rm-path",
        "custom-rollout-log-function-path",
        "custom-tis-function-path",
        "custom-update-weight-post-write-path",
        "data-source-path",
        "debug-rollout-only",
        "debug-train-only",
        "disable-compute-advantages-and-returns",
        "dynamic-sampling-filter-path",
        "enable-mtp-training",
        "entropy-coef",
        "eps-clip",
        "eps-clip-high",
        "eval-function-path",
        "eval-interval",
        "eval-max-response-len",
        "eval-prompt-data",
        "eval-top-p",
        "freeze-indexer",
        "global-batch-size",
        "group-rm",
        "hf-checkpoint",
        "input-key",
        "kl-coef",
        "kl-loss-coef",
        "kl-loss-type",
        "label-key",
        "load",
        "load-debug-rollout-data",
        "loss-type",
        "lr",
        "max-tokens-per-gpu",
        "megatron-config-path",
        "metadata-key",
        "micro-batch-size",
        "model-name",
        "mtp-loss-scaling-factor",
        "mtp-num-layers",
        "n-samples-per-eval-prompt",
        "n-samples-per-prompt",
        "normalize-advantages",
        "num-critic-only-steps",
        "num-epoch",
        "num-rollout",
        "num-steps-per-rollout",
        "opd-kl-coef",
        "opd-teacher-ckpt-step",
        "opd-teacher-load",
        "opd-type",
        "over-sampling-batch-size",
        "partial-rollout",
        "pipeline-model-parallel-size",
        "prompt-data",
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "ref-load",
        "rm-type",
        "rm-url",
        "rollout-all-samples-process-path",
        "rollout-batch-size",
        "rollout-data-postprocess-path",
        "rollout-external-engine-addrs",
        "rollout-function-path",
        "rollout-health-check-first-wait",
        "rollout-health-check-interval",
        "rollout-health-check-timeout",
        "rollout-max-response-len",
        "rollout-num-gpus",
        "rollout-num-gpus-per-engine",
        "rollout-sample-filter-path",
        "rollout-shuffle",
        "rollout-stop",
        "rollout-stop-token-ids",
        "rollout-temperature",
        "save",
        "save-debug-rollout-data",
        "save-debug-train-data",
        "save-interval",
        "sequence-parallel",
        "tensor-model-parallel-size",
        "train-backend",
        "update-weight-delta-checksum",
        "update-weight-delta-encoding",
        "update-weight-disk-dir",
        "update-weight-disk-keep-files",
        "update-weight-local-checkpoint-dir",
        "update-weight-mode",
        "update-weight-transport",
        "use-dynamic-batch-size",
        "use-fault-tolerance",
        "use-kl-loss",
        "use-opd",
        "use-rollout-logprobs",
        "use-rollout-routing-replay",
        "use-routing-replay",
        "use-tis",
        "use-wandb",
        "value-clip",
        "wandb-group",
        "wandb-key",
        "wandb-project",
    ]
)
"""Options that slime's English documentation of August 2026 names and its argument parser has, and Megatron's of its guides."""


def rows(*, counterpart: bool) -> list[list[str]]:
    """The cells of the rows of the page's tables."""
    head, _, last = PAGE.partition(f"## {WITHOUT}")
    lines = (head if counterpart else last).splitlines()
    cells = [
        line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and not line.startswith("| slime |")
    ]
    assert len(cells) > 10
    return cells


@cache
def names_of_tests(path: Path) -> set[str]:
    """Names of the functions of a file of tests."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def has_key(key: str) -> bool:
    """Whether there is a key of the configuration, such as ``eval.sets.NAME.path``, on the page of the configuration."""
    beginning = re.split(r"\.(?:options|sglang)\.", key)[0]
    name = r"\.(NAME|ROLE|\w+)\.".join(re.escape(part) for part in beginning.split(".NAME."))
    return re.search(rf"^\| `{name}(\.[\w.]+)?`", CONFIGURATION, re.MULTILINE) is not None


def test_every_documented_option_is_on_the_page_once() -> None:
    options = [
        option
        for row in rows(counterpart=True) + rows(counterpart=False)
        for option in re.findall(r"`--([\w-]+)", row[0])
    ]
    assert DOCUMENTED - set(options) == set()
    assert {option for option in options if options.count(option) > 1} <= {"rm-type"}, "remote_rm has a row of its own"


@pytest.mark.parametrize("cells", rows(counterpart=True), ids=lambda cells: cells[0][:40])
def test_a_counterpart_has_keys_and_a_test_that_exist(cells: list[str]) -> None:
    assert len(cells) == 3, cells
    _, agentrl, test = cells
    for key in re.findall(r"`((?:\w+\.)+\w+)", agentrl):
        assert has_key(key), f"{key} is no key of the configuration"
    assert re.search(r"`[^`]+`|function of a group|a folder", agentrl)
    tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", test)
    assert tests, test
    for path, name in tests:
        assert name in names_of_tests(REPOSITORY / path), f"{path} has no {name}"


def test_what_has_no_counterpart_has_a_reason() -> None:
    for cells in rows(counterpart=False):
        assert len(cells) == 2
        assert len(cells[1]) > 20, cells


def test_a_key_that_does_not_exist_is_seen() -> None:
    assert has_key("eval.sets.NAME.path")
    assert has_key("algo.loss.options.clip_low")
    assert not has_key("train.num_epoch")
    assert not has_key("algo.critic.clip")
    assert not has_key("trainer.steps")
