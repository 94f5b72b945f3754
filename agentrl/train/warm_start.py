"""The warm start of a run with ``model.warm_start``: supervised fine-tuning in a separate process.

Ray, the learner's processes and the engines start while it trains, if the GPU has room for both. The process ends before the
learner loads the weights, so that all its GPU memory is free again.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from agentrl.algo.registry import algorithm_faults
from agentrl.config.algo import AlgoConfig
from agentrl.config.engine_groups import training_engines, training_gpus
from agentrl.config.layers import config_files, merge_layers, save_config, saved_layers
from agentrl.config.load import find_config, read_yaml, validate
from agentrl.config.merging import Tree, merge
from agentrl.config.sampler import SamplerConfig
from agentrl.config.schema import Config
from agentrl.config.sft import SftConfig
from agentrl.config.started_engines import memory_shares, started_engines
from agentrl.core.child_process import ChildProcess
from agentrl.core.errors import ConfigError, LearnerError, UserError
from agentrl.evaluation.checkpoint_model import check_model
from agentrl.learner.device import gpu_bytes, resolve_device
from agentrl.models.learning_rates import with_rates
from agentrl.models.reference_policy import pin_frozen, pin_reference, resolve_critic
from agentrl.models.resolve import resolve_model
from agentrl.models.sharded_weights import is_sharded
from agentrl.obs.console import print_message
from agentrl.obs.run_end import read_end
from agentrl.obs.waiting import waiting
from agentrl.planner.training_summary import KEEPS_GRADIENTS, estimate_memory, fit_to_gpu, limit_beside_engines

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
    warm_folder = (folder / FOLDER).resolve()
    model = config.model.model_dump(mode="json", include={"path", "trust_remote_code"})
    of_the_run: Tree = {
        "model": {**model, "warm_start": None, "warm_start_options": {}},
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


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A warm start that is to be made."""

    name: str
    """``model.warm_start``."""
    config: Config
    """Configuration of ``agentrl sft``."""
    base: Path
    """Folder of the model that it fine-tunes."""
    log: Path
    """Its log."""

    @property
    def folder(self) -> Path:
        """Its configuration, metrics and model."""
        assert self.config.run.dir is not None, "see warm_start_config"
        return self.config.run.dir

    @property
    def model(self) -> Path:
        """Folder of the policy that it writes."""
        return self.folder / "model"

    @property
    def finished(self) -> bool:
        """Whether it was made before, with the same configuration."""
        made = (self.folder / "finished").is_file()
        return made and merge_layers(saved_layers(self.folder)) == self.config.model_dump(mode="json")

    async def train(self, console: Console) -> None:
        """Fine-tune the model, and print how far it is.

        Raises:
            LearnerError: the fine-tuning failed; the message has the end of its log.
            UserError: its configuration is invalid.
            CheckpointError: see `check_model`.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        save_config(self.config, self.folder)
        print_message(console, f"warm start {self.name}: {describe(self.config.sft)}")
        with waiting("training", "of the warm start"), _start(self.folder, self.log) as child:
            await _print_log(child, self.folder, console)
        await asyncio.to_thread(check_model, self.model)
        (self.folder / "finished").touch()

    def why_alone(self, run: Config) -> str:
        """Return why the engines of a run cannot start while it trains; empty if they can."""
        warm = self.config
        if run.learner.lora is not None and run.weights.adapters == "only":
            return "with weights.adapters=only they keep the weights that they load"
        frozen = next((role for role, options in run.env.roles.items() if options.frozen == str(self.model)), None)
        if frozen is not None:
            return f"env.roles.{frozen}.frozen is the policy that it trains"
        if warm.learner.ranks > 1:
            return f"it has learner.ranks={warm.learner.ranks}"
        engines = [engine for engine in started_engines(run) if engine.device == "cuda"]
        if not engines or resolve_device(warm.learner) == "cpu":
            return ""
        if not run.placement.shares_gpus and torch.cuda.device_count() > sum(engine.engine_ranks for engine in engines):
            return ""  # it trains on the first GPU, which no engine has
        if run.sampler.urls or len(engines) > training_engines(run.sampler):
            return "engines of teachers, frozen roles, snapshots, judges and evaluations may be on its GPU"
        return self._why_no_memory(run, engines)

    def _why_no_memory(self, run: Config, engines: list[SamplerConfig]) -> str:
        shares, gpu = memory_shares(engines), gpu_bytes()
        if shares is None:
            return "sampler.sglang.mem_fraction_static is not set, so that they take most of the GPU"
        if self.config.learner.backend not in KEEPS_GRADIENTS or gpu is None:
            return "the memory that it needs is not known"
        config = self.config.model_copy(update={"algo": AlgoConfig()})
        config, _ = fit_to_gpu(with_rates(config, self.base, None, "sft"), self.base)
        sft_bytes, share = estimate_memory(config, self.base)[0].total, max(shares)
        count = 1 if run.placement.shares_gpus else math.ceil(training_gpus(run.sampler) / torch.cuda.device_count())
        if sft_bytes <= limit_beside_engines(count * share, gpu):
            return ""
        return (
            f"it needs about {sft_bytes / 2**30:.1f} GiB of the GPU's {gpu / 2**30:.1f}, and {count} on it take "
            f"sampler.sglang.mem_fraction_static={share:g} each"
        )


def initial_policy(
    config: Config, folder: Path, checkpoint: Path | None, console: Console
) -> tuple[Config, Path, WarmStart | None]:
    """Return the configuration of a run with its reference policy and learning rates, the folder of its first weights, and the
    warm start that is to write them, if there is one.

    The weights are those of the checkpoint that the run resumes from, else of its warm start, else of ``model.path``. A
    finished warm start with the same configuration is reused; anything else starts again.

    Raises:
        ModelError: the model does not exist.
    """
    sft_config = warm_start_config(config, folder)
    base = resolve_model(config.model.path)
    warm = None
    if sft_config is not None:
        assert config.model.warm_start is not None, "it has one"
        warm = WarmStart(config.model.warm_start, sft_config, base, folder / "logs" / f"{FOLDER}.log")
    initial = base if warm is None else warm.model
    config = pin_frozen(pin_reference(config, initial), initial)
    if checkpoint is None and warm is not None and not warm.finished:
        return with_rates(config, base, resolve_critic(config.algo, base)), initial, warm
    if checkpoint is None and warm is not None:
        print_message(console, f"warm start {initial}, made before")
    # With LoRA a checkpoint's model has merged weights, and the learner needs those of the base model. Without weights in it,
    # learner and engines begin with the initial ones, until the learner has loaded the checkpoint and sends its weights.
    model = initial
    if checkpoint and config.learner.lora is None and not is_sharded(checkpoint / "model"):
        model = checkpoint / "model"
    return with_rates(config, model, resolve_critic(config.algo, model)), model, None


def _start(warm_folder: Path, log: Path) -> ChildProcess:
    log.unlink(missing_ok=True)
    files = [f"--config={file}" for file in config_files(warm_folder)]
    command = [sys.executable, "-m", "agentrl.cli.main", "sft", *files]
    env = {"TQDM_DISABLE": "1"}  # no progress bars of other libraries among its lines
    return ChildProcess.start(command, log=log, name="the warm start", env=env, error=LearnerError)


async def _print_log(child: ChildProcess, folder: Path, console: Console) -> None:
    """Print the log of the fine-tuning line by line until it has ended.

    It has once its end is recorded: the end of its interpreter takes seconds more.

    Raises:
        LearnerError, UserError: it failed.
    """
    code, last_line = None, b""
    with child.log.open("rb") as log:
        while code is None:
            end = read_end(folder)
            code = 0 if end is not None and not end.error else child.exit_code()
            lines, _, last_line = (last_line + log.read()).rpartition(b"\n")
            for line in lines.decode(errors="replace").splitlines():
                console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
            await asyncio.sleep(_POLL_S if code is None else 0)
    if code == 2:
        raise UserError(f"model.warm_start: {child.log_tail(3)}")
    if code != 0:
        child.check()
