"""What starts the engines of a run: here, as processes of this machine; elsewhere by whoever implements `Launcher`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import ConfigError
from agentrl.inference.launch.processes import LOOPBACK, EngineProcess, launch_embedded, launch_sglang


class RunningEngine(Protocol):
    """An engine that a run has started. All methods are safe to call from any thread, and after it has ended."""

    @property
    def url(self) -> str:
        """Where it answers."""
        ...

    @property
    def log(self) -> str:
        """Where its log lies, in words for people."""
        ...

    def check(self) -> None:
        """Raise `EngineError` with the end of its log where it has ended. Returns within milliseconds."""
        ...

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""
        ...

    def stop(self) -> None:
        """End it and everything it started."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class Launcher(Protocol):
    """Starts the engines of a run by their numbers, which count from 0."""

    def launch(self, number: int) -> RunningEngine:
        """Start an engine, or start it again, and block until it is healthy.

        Raises:
            ConfigError: an option does not fit.
            EngineError: it died or stayed silent; the message has its last log lines.

        """
        ...


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the engines of a run are."""

    config: SamplerConfig
    """Of which kind."""
    model: Path
    """Hugging Face folder that they start with."""
    logs: Path
    """Folder for ``engine-0.log`` and so on."""
    seed: int
    """Of what is sampled without a seed of its own; each engine adds its number."""

    def start(self, number: int, *, host: str = LOOPBACK, gpus: Sequence[str] = ()) -> EngineProcess:
        """Start engine ``number`` on this machine and block until it is healthy; see `Launcher.launch`.

        Args:
            number: of the engine.
            host: the address of this machine at which it listens.
            gpus: the GPUs it gets, as ``CUDA_VISIBLE_DEVICES`` names them; none: it is not told.

        """
        config, embedded = self.config, self.config.embedded
        log = self.logs / f"engine-{number}.log"
        port = config.port + number if config.port else 0
        seed, timeout_s = self.seed + number, config.start_timeout_s
        if config.backend == "sglang":
            return launch_sglang(
                self.model,
                log=log,
                host=host,
                port=port,
                seed=seed,
                options=config.sglang_options,
                python=config.python,
                gpus=gpus,
                timeout_s=timeout_s,
            )
        return launch_embedded(
            self.model,
            log=log,
            host=host,
            port=port,
            seed=seed,
            dtype=embedded.dtype,
            slots=embedded.slots,
            context=embedded.context,
            threads=embedded.threads,
            timeout_s=timeout_s,
        )


class LocalLauncher:
    """Starts engines on this machine, each on GPUs of its own while there are enough."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start nothing yet."""
        self._spec = spec

    def launch(self, number: int) -> EngineProcess:
        """Start an engine; see `Launcher.launch`."""
        config = self._spec.config
        gpus = visible_gpus() if config.device == "cuda" else []
        return self._spec.start(number, gpus=gpus_of(number, config.engine_ranks, gpus) if gpus else ())


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if named is None else named.split(",")
    return [name.strip() for name in names[:count]]


def gpus_of(number: int, each: int, gpus: Sequence[str]) -> list[str]:
    """Return the GPUs of engine ``number``: the last ``each`` for the first, those before them for the next, and so on.

    A learner beside the engines has the first GPUs. Where there are no more, engines share.

    Raises:
        ConfigError: an engine wants more than there are.

    """
    blocks = len(gpus) // each
    if not blocks:
        raise ConfigError(
            f"an engine wants {each} GPUs (sampler.sglang.tp_size, pp_size and dp_size), and this machine has {len(gpus)}: "
            "lower them"
        )
    end = len(gpus) - number % blocks * each
    return list(gpus[end - each : end])
