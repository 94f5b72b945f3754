"""Checks of supervised fine-tuning before anything is started."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.config.algo import AlgoConfig
from agentrl.config.checks import endpoint_faults
from agentrl.config.model import RenderConfig
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, MissingError
from agentrl.core.registry import make_env, make_tasks
from agentrl.data.hub import is_dataset
from agentrl.data.rows import check_file
from agentrl.learner.registry import make_backend
from agentrl.models.export import check_free
from agentrl.models.learning_rates import with_rates
from agentrl.models.load import read_max_positions, read_vocab_size
from agentrl.models.resolve import resolve_model
from agentrl.models.shipped_architectures import shipped_architecture
from agentrl.planner.training_summary import describe_memory, describe_model, describe_training, fit_to_gpu
from agentrl.render.registry import load_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.runtime.checks import check_packages
from agentrl.sft.base import EpochData, SftData, SftFile, split_off
from agentrl.sft.chats import Chats, read_chats
from agentrl.sft.demonstrations import Demonstrations
from agentrl.sft.recorded import RecordedFile, RecordedRollouts, read_recorded


@dataclass(frozen=True, slots=True)
class SftRun:
    """A run whose data and model are known."""

    config: Config
    """With numbers in place of ``auto`` and of ``sft.epochs``."""
    model: Path
    """Folder of the policy."""
    data: SftData
    """What is trained on."""
    evaluation: EpochData | None
    """What is evaluated on."""
    lines: list[str]
    """Lines for the user."""
    content: str = ""
    """Number and CRC-32 of the chats or rollouts; empty for demonstrations."""


@dataclass(frozen=True, slots=True)
class RendererOf:
    """Builds the renderer of a model folder in the calling process."""

    folder: Path
    config: RenderConfig
    trust_remote_code: bool = False

    def __call__(self) -> ChatRenderer:
        """Return a new renderer."""
        return load_renderer(self.folder, self.config, trust_remote_code=self.trust_remote_code)


def check_sft(config: Config) -> None:
    """Check the source of the data, and the packages of the run's outputs.

    Raises:
        UserError: with the value and the key to change.
    """
    if faults := [*endpoint_faults(config)]:
        raise ConfigError(faults[0])
    if config.sources:
        raise ConfigError(
            f"sources={', '.join(config.sources)}: demonstrations are of one environment; leave out sources, and set env and "
            "tasks"
        )
    if config.data.path is not None or config.sft.rollouts.path is not None:
        _check_files(config)
    elif config.tasks.name is None:
        raise ConfigError(
            "data.path, sft.rollouts.path and tasks.name are not set: set data.path to a file of chats, sft.rollouts.path to a "
            "run, or tasks.name to a taskset whose demonstrator() plays its tasks"
        )
    else:
        make_tasks(config.tasks.name, config.tasks.options)
        make_env(config.env.name, config.env.options)
    check_packages(config.learner, config.obs)
    if config.sft.out is not None:
        check_free(config.sft.out, "sft.out=")
    make_backend(config.learner).check(config.algo, [])


def _check_files(config: Config) -> None:
    data, sft = config.data, config.sft
    for key, path in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if path is not None and not is_dataset(path.expanduser()):
            check_file(path.expanduser(), key)
    if data.streaming:
        raise ConfigError("data.streaming=true: agentrl sft reads chats by number, from the disk; leave it out")
    if data.max_prompt_tokens is not None:
        raise ConfigError(
            f"data.max_prompt_tokens={data.max_prompt_tokens}: agentrl sft leaves out long chats by sft.max_tokens; leave it out"
        )
    of_demonstrations = {"sft.curriculum": sft.curriculum, "sft.reseed_option": sft.reseed_option}
    for key, value in of_demonstrations.items():
        if value:
            raise ConfigError(
                f"{key} is set, which is for demonstrations of a taskset, and "
                + (
                    f"data.path={data.path} has chats"
                    if data.path
                    else f"sft.rollouts.path={sft.rollouts.path} has rollouts"
                )
            )


def prepare_sft(config: Config) -> SftRun:
    """Check a run, read its chats, and return what it trains.

    Raises:
        UserError: with the value and the key to change.
    """
    check_sft(config)
    model = resolve_model(config.model.path)
    lines = [describe_model(config.model.path, model), *_check_model(config, model)]
    resolved, memory_lines = fit_to_gpu(with_rates(_without_reference(config), model, None, "sft"), model)
    run = _open_data(config.model_copy(update={"learner": resolved.learner, "batch": resolved.batch}), model)
    return replace(run, lines=lines + memory_lines + run.lines)


@dataclass(frozen=True, slots=True)
class SftPlan:
    """The description of a run, and what this machine lacks for it."""

    lines: list[str] = field(default_factory=list)
    """Lines that describe the run for the user."""
    missing_resources: list[str] = field(default_factory=list)
    """What this machine lacks for the run."""


def plan_sft(config: Config) -> SftPlan:
    """Check everything that `prepare_sft` does, and list what this machine lacks; no model is fetched.

    Raises:
        UserError: with the value and the key to change.
    """
    plan = SftPlan()
    model: Path | None = None
    with _collect_missing(plan):
        check_sft(config)
    with _collect_missing(plan):
        model = resolve_model(config.model.path, fetch=False)
    plan.lines.append(describe_model(config.model.path, model))
    folder = model or shipped_architecture(config.model.path)
    if folder is not None:
        with _collect_missing(plan):
            plan.lines.extend(_check_model(config, folder))
            plan.lines.extend(describe_memory(_without_reference(config), folder))
    if model is not None and not plan.missing_resources:
        with _collect_missing(plan):
            plan.lines.extend(_open_data(config, model).lines)
    return plan


@contextmanager
def _collect_missing(plan: SftPlan) -> Iterator[None]:
    try:
        yield
    except MissingError as error:
        plan.missing_resources.extend(str(error).splitlines())


def _check_model(config: Config, model: Path) -> list[str]:
    make_backend(config.learner).check(config.algo, [model])
    return describe_training(config, model, None, "sft")


def _without_reference(config: Config) -> Config:
    """Return the configuration for estimates of memory: supervised fine-tuning has no reference policy."""
    return config.model_copy(update={"algo": AlgoConfig()})


def _open_data(config: Config, model: Path) -> SftRun:
    """Return the run with its data; all chats are read."""
    make_renderer = RendererOf(model, config.render, config.model.trust_remote_code)
    data, sft = config.data, config.sft
    if data.path is None and sft.rollouts.path is None:
        lines = [f"{'data':<13}demonstrations of {config.tasks.name}: {sft.steps} steps of {sft.batch_size}"]
        return SftRun(config, model, Demonstrations(config, make_renderer), None, lines)
    context = read_max_positions(model)
    file: SftFile
    if data.path is None:
        file = read_recorded(config, make_renderer, read_vocab_size(model), context)
        config = config.model_copy(update={"sft": sft.model_copy(update={"workers": 0})})  # nothing is encoded
        sft = config.sft
    else:
        file = read_chats(config, data.path, "data.path", make_renderer, context)
    content, lines = f"{len(file.numbers)} {file.unit}, crc32 {file.checksum:08x}", [f"{'data':<13}{file.description}"]
    evaluated: SftFile | None = None
    if data.eval_path is not None:
        evaluated = read_chats(config, data.eval_path, "data.eval_path", make_renderer, context)
        lines.append(f"{'evaluation':<13}{evaluated.description}")
    elif sft.eval_share:
        file, evaluated = split_off(file, sft.eval_share, sft.seed)
        lines.append(
            f"{'evaluation':<13}{len(evaluated.numbers):,} of these {file.unit} (sft.eval_share={sft.eval_share:g})"
        )
    if sft.steps is not None:
        count = sft.steps * sft.batch_size
    else:
        assert sft.epochs is not None, "the configuration has set it"
        count = math.ceil(sft.epochs * len(file.numbers))
    steps = -(-count // sft.batch_size)
    lines.append(f"{'length':<13}{steps} steps of {sft.batch_size} {file.unit}, {count / len(file.numbers):.3g} epochs")
    resolved = config.model_copy(update={"sft": sft.model_copy(update={"steps": steps, "epochs": None})})
    evaluation = None
    if evaluated is not None:
        evaluation = _epochs(resolved, make_renderer, evaluated, len(evaluated.numbers), shuffled=False)
    return SftRun(resolved, model, _epochs(resolved, make_renderer, file, count), evaluation, lines, content)


def _epochs(
    config: Config, make_renderer: RendererOf, file: SftFile, count: int, *, shuffled: bool = True
) -> EpochData:
    cls = RecordedRollouts if isinstance(file, RecordedFile) else Chats
    return cls(config, make_renderer, file, count, shuffled=shuffled)
