"""Starting engines in processes of their own, and telling when one has died."""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, EngineError, PortInUseError
from agentrl.process import ChildProcess, free_port

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine."""

    url: str
    """Where it answers, such as ``http://127.0.0.1:30000``."""
    child: ChildProcess
    """Its process."""

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.child.alive()

    def check(self) -> None:
        """Raise `EngineError` with the last log lines where the engine has died."""
        self.child.check()

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""
        return self.child.log_tail(lines)

    def stop(self) -> None:
        """End it and everything it started."""
        self.child.stop()


def launch_embedded(
    model: Path,
    *,
    log: Path,
    port: int = 0,
    seed: int = 0,
    dtype: str = "float32",
    slots: int = 256,
    context: int = 2048,
    threads: int = 2,
    version: int = 0,
    timeout_s: float = 300.0,
) -> EngineProcess:
    """Start the embedded engine on a model folder and wait until it is healthy.

    Args:
        model: Hugging Face folder.
        log: file that takes what it prints.
        port: 0 takes a free one.
        seed: of sampling.
        dtype: ``float32`` or ``bfloat16``, of weights and KV cache.
        slots: sequences whose KV cache is kept.
        context: tokens of a sequence.
        threads: CPU threads of torch.
        version: policy version of the weights in the folder.
        timeout_s: how long it may take.

    Raises:
        PortInUseError: something else listens on ``port``.
        EngineError: it died or stayed silent; the message has its last log lines.
    """
    flags = {
        "model": model,
        "dtype": dtype,
        "max-slots": slots,
        "max-context": context,
        "threads": threads,
        "seed": seed,
        "weight-version": version,
    }
    command = [sys.executable, "-m", "agentrl.sampler.embedded", *_flags(flags)]
    # Threads that spin while they wait make the engine fifty times slower where another process wants the cores too.
    env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return _launch(command, log, port, "the embedded engine", env, timeout_s)


def launch_sglang(
    model: Path,
    *,
    log: Path,
    port: int = 0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
) -> EngineProcess:
    """Start ``sglang.launch_server`` on a model folder and wait until it is healthy.

    Args:
        model: Hugging Face folder.
        log: file that takes what it prints.
        port: 0 takes a free one.
        seed: of sampling.
        options: SGLang's own options: ``{"mem_fraction_static": 0.5}`` becomes ``--mem-fraction-static 0.5``, a True
            becomes a bare flag, a list several values.
        timeout_s: how long it may take.

    Raises:
        ConfigError: SGLang is not installed here.
        PortInUseError: something else listens on ``port``.
        EngineError: it died or stayed silent; the message has its last log lines.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "sampler.backend=sglang: SGLang is not installed; install it with `pip install 'agentrl[sglang]'`, or set "
            "sampler.url to a running server, or sampler.backend=embedded"
        )
    flags = {"model-path": model, "random-seed": seed, **(options or {})}
    return _launch([sys.executable, "-m", "sglang.launch_server", *_flags(flags)], log, port, "SGLang", {}, timeout_s)


def _launch(
    command: Sequence[str], log: Path, port: int, name: str, env: Mapping[str, str], timeout_s: float
) -> EngineProcess:
    port = _usable(port)
    address = ["--host", _HOST, "--port", str(port)]
    child = ChildProcess.start([*command, *address], log=log, name=name, env=env, error=EngineError)
    url = f"http://{_HOST}:{port}"
    child.wait_healthy(f"{url}/health", timeout_s)
    return EngineProcess(url, child)


def _usable(port: int) -> int:
    if port == 0:
        return free_port(_HOST)
    with socket.socket() as probe:
        # As servers do: a port whose last connections are only winding down is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise PortInUseError(
                f"sampler.port={port} cannot be used ({error.strerror}): set sampler.port to a free port, or to 0"
            ) from error
    return port


def _flags(options: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return flags
