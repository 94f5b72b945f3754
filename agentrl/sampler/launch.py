"""Starting engines in processes of their own, and telling when one has died."""

from __future__ import annotations

import importlib.util
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, EngineError, PortInUseError
from agentrl.process import ChildProcess

_HOST = "127.0.0.1"
_POLL_S = 0.02


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
    # Large models share matrix products among OpenMP threads. Where these spin while they wait, an engine becomes many
    # times slower as soon as another process wants the cores too.
    env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    begun = time.monotonic()
    port_file = log.with_name(log.name + ".port")
    port_file.unlink(missing_ok=True)
    with _held(port):
        pass
    command += ["--host", _HOST, "--port", str(port), "--port-file", str(port_file)]
    child = ChildProcess.start(command, log=log, name="the embedded engine", env=env, error=EngineError)
    # The engine picks a free port itself: one picked here could be somebody else's by the time it starts.
    while not port_file.exists():
        if not child.alive() or time.monotonic() - begun > timeout_s:
            break
        time.sleep(_POLL_S)
    port = int(port_file.read_text()) if port_file.exists() else port
    return _healthy(child, port, timeout_s - (time.monotonic() - begun))


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
    with _held(port) as held:
        command = [sys.executable, "-m", "sglang.launch_server", *_flags(flags), "--host", _HOST, "--port", str(held)]
        child = ChildProcess.start(command, log=log, name="SGLang", error=EngineError)
        return _healthy(child, held, timeout_s)


def _healthy(child: ChildProcess, port: int, timeout_s: float) -> EngineProcess:
    url = f"http://{_HOST}:{port}"
    child.wait_healthy(f"{url}/health", timeout_s)
    return EngineProcess(url, child)


@contextmanager
def _held(port: int) -> Iterator[int]:
    """Keep ``port`` (0: a free one, which is returned) from everybody but a server that binds it by its number.

    Both sockets have SO_REUSEADDR and this one does not listen: Linux then lets the server have the port, and gives it
    to nobody who asks for any free one. Loading a model lasts minutes, in which many do.

    Raises:
        PortInUseError: something else listens there.
    """
    with socket.socket() as holder:
        # As servers do: a port whose last connections are only winding down is free.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((_HOST, port))
        except OSError as error:
            raise PortInUseError(
                f"sampler.port={port} cannot be used ({error.strerror}): set sampler.port to a free port, or to 0"
            ) from error
        yield int(holder.getsockname()[1])


def _flags(options: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return flags
