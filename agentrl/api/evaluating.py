"""``agentrl.evaluate`` and ``agentrl.rollout``: a policy without training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.api.event_loop import run_to_end
from agentrl.api.python_settings import PYTHON_SETTINGS, ConfigLike, PythonSettings, new_layers, read_settings
from agentrl.api.settings import file_layers, load_environment
from agentrl.config.layers import CONFIG, Layer, merge_layers, saved_layers
from agentrl.config.merging import Tree, merge
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.imports import python_objects
from agentrl.core.types import Rollout
from agentrl.obs.console import make_console

if TYPE_CHECKING:
    from agentrl.evaluation.evaluate import SetResult


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation.

    Example: ``Evaluation("runs/mine/checkpoints/step_000040/model", {"eval/exact_match": 0.71, …}, […])``.
    """

    model: str
    """The policy: a folder or a name."""
    metrics: Mapping[str, float]
    """``eval/METRIC``, or ``eval/SET/METRIC`` if the configuration names sets."""
    sets: Sequence[SetResult]
    """Result and rollouts of each set."""

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of all sets, those of a task next to each other."""
        return [rollout for result in self.sets for rollout in result.rollouts]

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{escape(key)}</td><td>{value:.4g}</td></tr>" for key, value in self.metrics.items())
        return f"<b>{escape(self.model)}</b><table>{rows}</table>"


def evaluate(
    config: ConfigLike = None, *, checkpoint: str | os.PathLike[str] | None = None, **settings: object
) -> Evaluation:
    """Evaluate a policy, as ``agentrl eval`` does.

    Args:
        config: see `train`.
        checkpoint: a run, a checkpoint or a model folder; None: ``model.path``. Without ``config`` the configuration is that of
            the checkpoint's run.
        settings: see `train`.

    Raises:
        UserError: a mistake in the configuration, or there is nothing to evaluate on.
        RunStopped: Ctrl-C, the interrupt of a notebook's kernel, or the failure policy ended it.
        EngineError: an engine failed.
    """
    from agentrl.evaluation.evaluate import flat_metrics
    from agentrl.evaluation.evaluate_policy import evaluate_policy

    files, python = read_settings(config, settings)
    with python_objects(python.objects):
        policy_config = _load(config, files, python, checkpoint)
        results, scores = run_to_end(lambda: evaluate_policy(policy_config, make_console()), "agentrl.evaluate")
    return Evaluation(policy_config.model.path, {**flat_metrics(results), **scores}, results)


def rollout(
    config: ConfigLike = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    count: int | None = None,
    split: Literal["train", "eval"] = "train",
    out: str | Path | None = None,
    **settings: object,
) -> list[Rollout]:
    """Sample episodes as in training, and return their rollouts, as ``agentrl rollout`` does.

    Args:
        config: see `train`.
        checkpoint: see `evaluate`.
        count: tasks, in the order of training; of each ``rollout.n_samples_per_prompt`` episodes. None: ``rollout.batch_size``.
        split: whether the tasks of ``tasks.train_split`` or of ``tasks.eval_split``.
        out: a new file ending in ``.jsonl`` or ``.parquet``, to which each rollout is written as it ends.
        settings: see `train`.

    Raises:
        UserError: a mistake in the configuration or in an argument.
        RunStopped: Ctrl-C, the interrupt of a notebook's kernel, or the failure policy ended it; ``out`` has what it had.
        AgentrlError: an engine or a tool server failed.
    """
    from agentrl.evaluation.sample_to_file import SamplePlan, check_plan, sample

    files, python = read_settings(config, settings)
    with python_objects(python.objects):
        policy_config = _load(config, files, python, checkpoint)
        tasks = policy_config.rollout.batch_size if count is None else count
        plan = SamplePlan(None if out is None else Path(out), split, tasks)
        check_plan(policy_config, plan)
        return run_to_end(lambda: sample(policy_config, plan, make_console()), "agentrl.rollout")


def _load(
    config: ConfigLike, files: Sequence[str], python: PythonSettings, checkpoint: str | os.PathLike[str] | None
) -> Config:
    """Return the configuration with which a policy is evaluated or sampled; the same rules as for ``agentrl eval``."""
    if checkpoint is None:
        loaded = load_environment(new_layers(config, files, python))
    else:
        run_config, layers = checkpoint_layers(os.fspath(checkpoint), use_run=config is None)
        base = file_layers(files) if run_config else new_layers(config, files, python)
        loaded = load_environment([*layers[:-1], *base, Layer(PYTHON_SETTINGS, python.tree), layers[-1]])
        check_own_engine(loaded)
    python.check(loaded)
    return loaded


def checkpoint_layers(checkpoint: str, *, use_run: bool) -> tuple[Path | None, list[Layer]]:
    """Return the file of the configuration of a checkpoint's run, if it is used, and its layers; the last one has the model.

    Args:
        checkpoint: a run's folder, a checkpoint, or a model folder.
        use_run: whether the configuration of its run is used, if it belongs to one.

    Raises:
        ConfigError, CheckpointError: it is none of them, or is damaged.
    """
    from agentrl.evaluation.checkpoint_model import checkpoint_model, find_run_folder

    model = Layer("checkpoint", {"model": {"path": checkpoint_model(checkpoint)}})
    folder = find_run_folder(checkpoint) if use_run else None
    if folder is None:
        return None, [model]
    tree = _without_engine_and_ports(merge_layers(saved_layers(folder)))
    return folder / CONFIG, [Layer(str(folder / CONFIG), tree), model]


def check_own_engine(config: Config) -> None:
    """Check that the engine is one that the evaluation starts.

    Raises:
        ConfigError: it runs already.
    """
    if config.sampler.url is not None:
        raise ConfigError(
            f"sampler.url={config.sampler.url} with --checkpoint: an engine that runs already samples with its own "
            "weights, not the checkpoint's. Leave out sampler.url, or leave out --checkpoint and set model.path"
        )


def _without_engine_and_ports(tree: Tree) -> Tree:
    """Return a run's configuration without its engine and ports: the run may still be using them."""
    tools = {name: {**tool, "port": 0} for name, tool in tree.get("tools", {}).items()}
    return merge(tree, {"sampler": {"url": None, "port": 0}, "tools": tools})
