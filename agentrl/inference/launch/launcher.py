"""Launchers of a run's engines: the protocols, and the implementation that starts processes on this machine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from zlib import crc32

from typing_extensions import override

from agentrl.config.engine_groups import engine_group, gpus_before
from agentrl.config.sampler import SamplerConfig
from agentrl.core.background import run_start
from agentrl.core.child_process import LOOPBACK, ChildProcess
from agentrl.core.errors import ConfigError
from agentrl.inference.launch.interpreter import Interpreter
from agentrl.inference.launch.kept_engines import EngineRecord, KeptChild, end_engines_on, take_engine
from agentrl.inference.launch.processes import EngineMachine, EngineProcess, launch_embedded, launch_sglang
from agentrl.models.load import read_dtype
from agentrl.obs.waiting import waiting


class RunningEngine(Protocol):
    """An engine started by a run. All methods are safe to call from any thread, also after the engine has ended."""

    @property
    def url(self) -> str:
        """Base URL of its HTTP server."""
        ...

    @property
    def log(self) -> str:
        """Location of its log, for messages: a path, and the machine if it is another one."""
        ...

    def check(self) -> None:
        """Raise `EngineError` with the end of its log if it has ended. Returns within milliseconds."""
        ...

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""
        ...

    @property
    def start_details(self) -> str:
        """What its start consisted of, for the user; may be empty."""
        ...

    def release(self) -> None:
        """Leave it to the next run if it is kept, otherwise stop it; nothing is in progress."""
        ...

    def stop(self) -> None:
        """Terminate it and all of its child processes."""
        ...

    def kill(self) -> None:
        """Kill it at once."""
        ...


E = TypeVar("E", bound=RunningEngine)


class Launcher(Protocol):
    """Starts the engines of a run by number, from 0."""

    def launch(self, number: int) -> RunningEngine:
        """Start or restart an engine and block until it is healthy.

        Raises:
            ConfigError: an option is invalid.
            EngineError: it ended or did not become healthy in time; the message has its last log lines.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Configuration of the engines of a run."""

    config: SamplerConfig
    """Backend and its options."""
    model: Path
    """Hugging Face folder of the initial weights."""
    logs: Path
    """Folder for ``engine-0.log`` and so on."""
    seed: int
    """Seed of requests without a seed; each engine adds its number."""
    trust_remote_code: bool = False
    """``model.trust_remote_code``."""
    returns_experts: bool = False
    """Whether requests may ask for the experts of tokens, which SGLang records only with an option."""
    restores_weights: bool = False
    """Whether resumed weights are those that were released, of which the engine keeps a copy on the CPU."""
    keep_minutes: float | None = None
    """``sampler.keep_minutes``, of engines that get all weights from the learner before they sample; None: they end with the
    run."""

    overrides: Mapping[str, object] | None = None
    """What SGLang reads in place of entries of the model's ``config.json``. The engine then starts with random weights, and gets
    all from the learner before it samples."""

    serves: str = ""
    """``prefill`` or ``decode``, if the engine does one of the two; set by `start`."""

    def start(
        self, number: int, *, host: str = LOOPBACK, gpus: Sequence[str] = (), machine: EngineMachine | None = None
    ) -> EngineProcess:
        """Start engine ``number`` on this machine and block until it is healthy; see `Launcher.launch`.

        Args:
            number: number of the engine.
            host: address of this machine on which it listens.
            gpus: GPUs of the engine on this machine, as in ``CUDA_VISIBLE_DEVICES``; empty: the variable is not set.
            machine: this one, if the engine has several.
        """
        group, config = engine_group(self.config, number)
        if group:
            spec = replace(self, config=config, serves=self.config.groups[group].serves)
            return spec.start(number, host=host, gpus=gpus, machine=machine)
        start_child, key = ChildProcess.start, ""
        if self.keep_minutes is not None:
            key = self._key(number, host, gpus)
            if (left_engine := take_engine(key, self.keep_minutes)) is not None:
                record, child = left_engine
                grace_s = 0.0 if config.uses_sglang else 5.0
                return EngineProcess(record.url, child, grace_s, "an earlier run has left it")
            start_child = partial(KeptChild.start_kept, self.keep_minutes)
        port = config.port + number if config.port else 0
        end_engines_on(gpus, port)
        options: dict[str, Any] = {
            "start_child": start_child,
            "log": self.logs / f"engine-{number}{'' if machine is None else f'.machine-{machine.rank}'}.log",
            "host": host,
            "port": port,
            "seed": self.seed + number,
            "timeout_s": config.start_timeout_s,
        }
        if config.backend == "embedded":
            engine = launch_embedded(
                self.model,
                config.embedded,
                trust_remote_code=self.trust_remote_code,
                restores_weights=self.restores_weights,
                **options,
            )
        else:
            engine = launch_sglang(
                self.model,
                options=self.sglang_options(),
                python=config.python,
                gpus=gpus,
                machine=machine,
                disaggregation=self.serves,
                **options,
            )
        if isinstance(engine.child, KeptChild):
            text = f"{config.backend} with {self.model}"
            engine.child.describe(EngineRecord(key, engine.url, engine.log, text, list(gpus)))
        return engine

    def _key(self, number: int, host: str, gpus: Sequence[str]) -> str:
        """Return a checksum of all in which engines may differ except their weights: equal for those that can be taken."""
        config = self.config
        python = config.python or Path(sys.executable)
        files = [file for suffix in ("json", "model", "jinja") for file in self.model.glob(f"*.{suffix}")]
        facts = [
            config.backend,
            [self.sglang_options(), str(python), Interpreter.probe(python).version]
            if config.uses_sglang
            else [config.embedded.model_dump(mode="json"), self.seed + number, self.restores_weights],
            host,
            config.port and config.port + number,
            list(gpus),
            self.trust_remote_code,
            [(file.name, _content(file)) for file in sorted(files) if not file.name.endswith(".index.json")],
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def sglang_options(self) -> dict[str, Any]:
        """Return the options of SGLang, which by itself would hold a float32 model in float16."""
        options: dict[str, Any] = {"trust_remote_code": True} if self.trust_remote_code else {}
        if self.config.device == "cuda":
            model_dtype = read_dtype(self.model)
            options["dtype"] = model_dtype if model_dtype in ("bfloat16", "float16") else "bfloat16"
        if self.returns_experts:
            options["enable_return_routed_experts"] = True
        if self.restores_weights and self.config.device == "cuda":
            options |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        if self.overrides is not None:
            options["load_format"] = "dummy"
        options |= self.config.sglang_options
        if self.overrides is not None:
            configured = str(self.config.sglang_option("json_model_override_args", "{}"))
            options.pop("json-model-override-args", None)
            options["json_model_override_args"] = json.dumps(json.loads(configured) | dict(self.overrides))
        return options


_OF_WEIGHTS = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Entries of JSON files that differ between checkpoints of one model."""


def _content(file: Path) -> str:
    """Return what a file of a model folder specifies about the model, besides its weights."""
    text = file.read_bytes()
    if file.name.endswith("config.json"):
        entries = json.loads(text)
        text = json.dumps({key: entries[key] for key in sorted(entries.keys() - _OF_WEIGHTS)}).encode()
    return f"{crc32(text):08x}"


class LocalLauncher(Launcher):
    """Starts engines on this machine, each on separate GPUs as long as there are enough.

    They have the numbers from ``first`` on, and take the GPUs after the ``first_gpu`` ones of other engines; None: after
    ``first`` engines of the same size.
    """

    def __init__(self, spec: EngineSpec, first: int = 0, first_gpu: int | None = None) -> None:
        self._spec = spec
        self._first = first
        self._first_gpu = first * spec.config.engine_ranks if first_gpu is None else first_gpu

    @override
    def launch(self, number: int) -> EngineProcess:
        config, (_, group) = self._spec.config, engine_group(self._spec.config, number)
        gpus = visible_gpus() if config.device == "cuda" else []
        first = self._first_gpu + gpus_before(config, number)
        engine = engine_gpus(first, group.engine_ranks, gpus) if gpus else ()
        return self._spec.start(self._first + number, gpus=engine)


async def launch(start: Callable[[], E], name: str) -> E:
    """Start an engine or router without blocking; if this is cancelled, it is ended.

    Args:
        start: starts it and blocks until it is healthy.
        name: for reports on what a run waits for.

    Raises:
        ConfigError, EngineError: see `Launcher.launch`.
    """
    engines: list[E] = []

    def note_started() -> E:
        engines.append(start())
        return engines[0]

    try:
        with waiting("start", f"of {name}", lambda: engines[0].start_details if engines else ""):
            return await run_start(note_started)
    except asyncio.CancelledError:
        for engine in engines:
            await asyncio.to_thread(engine.stop)
        raise


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as entries of ``CUDA_VISIBLE_DEVICES``."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if named is None else named.split(",")
    return [name.strip() for name in names[:count]]


def engine_gpus(first: int, gpu_count: int, gpus: Sequence[str]) -> list[str]:
    """Return the ``gpu_count`` GPUs of an engine that come, from the last one backwards, after ``first`` ones of other engines.

    A learner on the same machine uses the first GPUs. If there are fewer GPUs than engines need, engines share them.

    Raises:
        ConfigError: one engine needs more GPUs than there are.
    """
    blocks = len(gpus) // gpu_count
    if not blocks:
        raise ConfigError(
            f"an engine needs {gpu_count} GPUs (sampler.sglang.tp_size, pp_size and dp_size), and this machine has "
            f"{len(gpus)}: lower them"
        )
    end = len(gpus) - first % (blocks * gpu_count)
    end = end if end >= gpu_count else len(gpus)
    return list(gpus[end - gpu_count : end])
