"""The warm start of a run with ``model.warm_start``: supervised fine-tuning in a separate process.

The process ends before the rest of the run starts, so that all its GPU memory is free again.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from rich.console import Console

from agentrl.algo.registry import algorithm_faults
from agentrl.config.layers import config_files, merge_layers, save_config, saved_layers
from agentrl.config.load import find_config, read_yaml, validate
from agentrl.config.merging import Tree, merge
from agentrl.config.schema import Config
from agentrl.config.sft import SftConfig
from agentrl.core.child_process import ChildProcess
from agentrl.core.errors import ConfigError, LearnerError, UserError
from agentrl.models.learning_rates import with_rates
from agentrl.models.reference_policy import pin_frozen, pin_reference, resolve_critic
from agentrl.models.resolve import resolve_model
from agentrl.obs.console import print_message
from agentrl.runtime.interrupt import Interrupt

FOLDER = "warm_start"
"""Folder in the run's folder: configuration, metrics and ``model`` of the warm start."""
_POLL_S = 0.2


def warm_start_config(config: Config, folder: Path) -> Config | None:
    """Return the configuration of the warm start of a run in ``folder``, or None if the run has none.

    Raises:
        ConfigError: ``model.warm_start`` names no configuration, or one without data; messages name the key.
    """
    name = config.model.warm_start
    if name is None:
        return None
    warm_folder = folder / FOLDER
    of_the_run: Tree = {
        "model": {"path": config.model.path, "warm_start": None, "warm_start_options": {}},
        "render": config.render.model_dump(mode="json"),
        "run": {"dir": str(warm_folder)},
        "sft": {"out": str(warm_folder / "model")},
    }
    try:
        tree = merge(read_yaml(find_config(name)), config.model.warm_start_options)
        warm = validate(merge(tree, of_the_run), [algorithm_faults])
    except ConfigError as error:
        raise ConfigError(f"model.warm_start={name}: {error}") from None
    if warm.tasks.name is None and warm.data.path is None:
        raise ConfigError(f"model.warm_start={name}: it names neither chats (data.path) nor a taskset (tasks.name)")
    return warm


def describe(sft: SftConfig) -> str:
    """Return one line on the length of a warm start."""
    minutes = f", {sft.minutes:g} minutes at most" if sft.minutes else ""
    return f"{f'{sft.epochs:g} epochs' if sft.steps is None else f'{sft.steps} steps'} in batches of {sft.batch_size}{minutes}"


async def initial_policy(
    config: Config, folder: Path, checkpoint: Path | None, interrupt: Interrupt, console: Console
) -> tuple[Config, Path]:
    """Return the configuration of a run with its reference policy and learning rates, and the folder of its first weights.

    The weights are those of the checkpoint that the run resumes from, else of its warm start, else of ``model.path``.

    Raises:
        RunStopped, LearnerError, UserError: as in `warmed_model`.
        ModelError: the model does not exist.
    """
    if checkpoint is None:
        warm = await warmed_model(config, folder, interrupt, console)
    else:
        warm = (folder / FOLDER / "model").resolve() if config.model.warm_start else None
    config = pin_frozen(pin_reference(config, warm), warm)
    # With LoRA a checkpoint's model has merged weights, and the learner needs those of the base model.
    resumed = checkpoint / "model" if checkpoint and config.learner.lora is None else None
    model = resumed or warm or resolve_model(config.model.path)
    return with_rates(config, model, resolve_critic(config.algo, model)), model


async def warmed_model(config: Config, folder: Path, interrupt: Interrupt, console: Console) -> Path | None:
    """Return the folder of the warm-started policy of a run, or None if the run has no warm start.

    A finished warm start with the same configuration is reused; anything else starts again.

    Raises:
        RunStopped: Ctrl-C ended it.
        LearnerError: the fine-tuning failed; the message has the end of its log.
        UserError: its configuration is invalid.
    """
    warm = warm_start_config(config, folder)
    if warm is None:
        return None
    warm_folder = (folder / FOLDER).resolve()
    model, finished = warm_folder / "model", warm_folder / "finished"
    if finished.is_file() and merge_layers(saved_layers(warm_folder)) == warm.model_dump(mode="json"):
        print_message(console, f"warm start {model}, made before")
        return model
    shutil.rmtree(warm_folder, ignore_errors=True)
    warm_folder.mkdir(parents=True)
    save_config(warm, warm_folder)
    print_message(console, f"warm start {config.model.warm_start}: {describe(warm.sft)}")
    with _start(warm_folder, folder / "logs" / f"{FOLDER}.log") as child:
        async with interrupt.guard():
            await _print_log(child, console)
    finished.touch()
    return model


def _start(warm_folder: Path, log: Path) -> ChildProcess:
    log.unlink(missing_ok=True)
    files = [f"--config={file}" for file in config_files(warm_folder)]
    command = [sys.executable, "-m", "agentrl.cli.main", "sft", *files]
    env = {"TQDM_DISABLE": "1"}  # no progress bars of other libraries among its lines
    return ChildProcess.start(command, log=log, name="the warm start", env=env, error=LearnerError)


async def _print_log(child: ChildProcess, console: Console) -> None:
    """Print the log of the fine-tuning line by line until it has ended.

    Raises:
        LearnerError, UserError: it failed.
    """
    code, last_line = None, b""
    with child.log.open("rb") as log:
        while code is None:
            code = child.exit_code()
            lines, _, last_line = (last_line + log.read()).rpartition(b"\n")
            for line in lines.decode(errors="replace").splitlines():
                console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
            await asyncio.sleep(_POLL_S if code is None else 0)
    if code == 2:
        raise UserError(f"model.warm_start: {child.log_tail(3)}")
    if code != 0:
        child.check()
