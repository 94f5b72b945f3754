"""Starting engines in processes of their own, and telling when one has died."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agentrl.core.child_process import ChildProcess, answers, held_port
from agentrl.core.errors import AgentrlError, ConfigError, EngineError
from agentrl.inference.launch import cpu_sglang
from agentrl.inference.launch.interpreter import Interpreter
from agentrl.inference.launch.startup_log import Phase, StartLog, last_error

GUARD = Path(__file__).with_name("guard.py")
"""The script that ends a program together with its parent."""
LOOPBACK = "127.0.0.1"
_POLL_S = 0.02
_SLOW_POLL_S = 0.2
_MANY_LINES = 1000
_LONG_S = 20.0
"""A start that lasts longer is told of, at every new phase and with growing gaps."""
_OTHER_KEYS = {
    "port": "set sampler.port",
    "host": "an engine that the run starts is for the run alone; set sampler.url to use one elsewhere",
    "model": "set model.path",
    "model-path": "set model.path",
    "base-gpu-id": "the run gives each engine its GPUs; CUDA_VISIBLE_DEVICES says which ones the run may use",
    "gpu-id-step": "the run gives each engine its GPUs; CUDA_VISIBLE_DEVICES says which ones the run may use",
    "nnodes": "an engine that the run starts lies on one machine; set sampler.url to use a larger one",
}
"""Options of SGLang that are not for ``sampler.sglang``."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine."""

    url: str
    """Where it answers, such as ``http://127.0.0.1:30000``."""
    child: ChildProcess
    """Its process."""
    grace_s: float = 5.0
    """Seconds to end by itself when it is stopped; SGLang would report a crash in them."""

    @property
    def log(self) -> str:
        """Where its log lies."""
        return str(self.child.log)

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.child.alive()

    def check(self) -> None:
        """Raise `EngineError` with the last error and the last lines of its log where the engine has died."""
        try:
            self.child.check()
        except EngineError as error:
            # SGLang writes pages after what it died of.
            reason = last_error(self.log_tail(_MANY_LINES))
            raise EngineError(f"{error}\nThe last error in it: {reason}" if reason else str(error)) from None

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""
        return self.child.log_tail(lines)

    def stop(self) -> None:
        """End it and everything it started."""
        self.child.stop(self.grace_s)

    def kill(self) -> None:
        """End it and everything it started at once."""
        self.child.stop(0.0)


def launch_embedded(
    model: Path,
    *,
    log: Path,
    host: str = LOOPBACK,
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
        host: the address of this machine at which it listens.
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
    command = [sys.executable, "-m", "agentrl.inference.embedded", *flags_of(flags)]
    # Large models share matrix products among OpenMP threads. Where these spin while they wait, an engine becomes many
    # times slower as soon as another process wants the cores too.
    env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    begun = time.monotonic()
    port_file = log.with_name(log.name + ".port")
    port_file.unlink(missing_ok=True)
    with held_port(host, port, key="sampler.port"):
        pass
    command += ["--host", host, "--port", str(port), "--port-file", str(port_file)]
    child = ChildProcess.start(command, log=log, name="the embedded engine", env=env, error=EngineError)
    url = f"http://{host}:{_told_port(port_file, child, begun + timeout_s) or port}"
    child.wait_healthy(f"{url}/health", timeout_s - (time.monotonic() - begun))
    return EngineProcess(url, child)


def _told_port(port_file: Path, child: ChildProcess, deadline: float) -> int | None:
    """Wait for the port that the engine has bound; None: it died, or the time is over.

    It picks a free one itself: one picked here could be somebody else's by the time it starts.
    """
    while not port_file.exists():
        if not child.alive() or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return int(port_file.read_text())


def launch_sglang(
    model: Path,
    *,
    log: Path,
    host: str = LOOPBACK,
    port: int = 0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    python: Path | None = None,
    gpus: Sequence[str] = (),
    timeout_s: float = 600.0,
) -> EngineProcess:
    """Start ``sglang.launch_server`` on a model folder and wait until it is healthy.

    A start that lasts is told of by warnings in Python's log. With the option ``device: cpu`` and an interpreter whose
    torch knows no GPU, the stand-ins of `agentrl.inference.launch.cpu_sglang` are used.

    Args:
        model: Hugging Face folder.
        log: file that takes what it prints.
        host: the address of this machine at which it listens.
        port: 0 takes a free one.
        seed: of sampling.
        options: SGLang's own options: ``{"mem_fraction_static": 0.5}`` becomes ``--mem-fraction-static 0.5``, a True
            becomes a bare flag, a list several values.
        python: interpreter that runs it; agentrl need not be installed there. None: this one.
        gpus: the GPUs it gets, as ``CUDA_VISIBLE_DEVICES`` names them, in the order of its ranks; none: it is not told.
        timeout_s: how long it may take.

    Raises:
        ConfigError: SGLang is not installed there, or refuses an option.
        PortInUseError: something else listens on ``port``.
        EngineError: it died or stayed silent; the message has the phase, what was out of memory where that was it, and
            its last log lines.
    """
    options = options or {}
    _check_options(options)
    interpreter = Interpreter.look(python or Path(sys.executable))
    interpreter.require_sglang(chosen=python is not None)
    flags: dict[str, Any] = {"model-path": model, "random-seed": seed}
    env: dict[str, str] = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    if options.get("device") == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        if not interpreter.gpu and not interpreter.kernels:
            env |= cpu_sglang.environment()
            flags |= _dashed(cpu_sglang.OPTIONS)
    flags |= _dashed(options)
    guard = [sys.executable, "-S", str(GUARD)]
    with held_port(host, port, key="sampler.port") as held:
        server = [str(interpreter.python), "-m", "sglang.launch_server", *flags_of(flags)]
        command = [*guard, *server, "--host", host, "--port", str(held)]
        told = StartLog(log)
        child = ChildProcess.start(command, log=log, name="SGLang", env=env, error=EngineError)
        engine = EngineProcess(f"http://{host}:{held}", child, grace_s=0.0)
        try:
            _watch_start(engine, told, options, timeout_s)
        except BaseException:
            engine.stop()
            raise
    return engine


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of SGLang that the run itself sets."""
    for name in options:
        key = _OTHER_KEYS.get(name.replace("_", "-"))
        if key is not None:
            raise ConfigError(f"sampler.sglang.{name}={options[name]}: {key}")


def _watch_start(engine: EngineProcess, told: StartLog, options: Mapping[str, Any], timeout_s: float) -> None:
    """Block until the server is healthy.

    Raises:
        ConfigError: it refuses an option.
        EngineError: it died or stayed silent.
    """
    begun = time.monotonic()
    peak = 0
    said: tuple[Phase, float] = (Phase.IMPORTS, 0.0)
    while not answers(f"{engine.url}/health"):
        seconds = time.monotonic() - begun
        code = engine.child.exit_code()
        phase = told.read()
        if code is not None or seconds > timeout_s:
            raise _failed_start(told, options, code, peak, timeout_s)
        peak = max(peak, _resident_bytes(engine.child.pid))
        if seconds > _LONG_S and (phase is not said[0] or seconds > 2 * said[1]):
            _log.warning("SGLang is not up after %.0f s: %s (its log: %s)", seconds, phase.words, told.log)
            said = (phase, seconds)
        time.sleep(_SLOW_POLL_S)


def _failed_start(
    told: StartLog, options: Mapping[str, Any], code: int | None, host_peak: int, timeout_s: float
) -> AgentrlError:
    """Return the error for a start that failed: by its exit status, or without one for having lasted too long."""
    if refused := told.wrong_option(options):
        return ConfigError(f"{refused}. The end of its log {told.log}:\n{told.tail(3)}")
    where = told.phase.words
    if code is None:
        what = (
            f"SGLang does not answer after {timeout_s:g} s, {where}; raise sampler.start_timeout_s if it needs longer"
        )
    elif code < 0:
        what = f"SGLang ended while {where} (signal {signal.Signals(-code).name})"
    else:
        what = f"SGLang ended while {where} (exit status {code})"
    reason = told.out_of_memory(code, host_peak) or last_error(told.text)
    return EngineError(f"{what}{': ' + reason if reason else ''}. The end of its log {told.log}:\n{told.tail()}")


def _resident_bytes(pid: int) -> int:
    """Return the memory of a process and of all that it started; what is gone meanwhile counts nothing."""
    total = 0
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(pid)
        for process in [leader, *leader.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += int(process.memory_info().rss)
    return total


def _dashed(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in options.items()}


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as arguments: ``some_name: 1`` is ``--some-name 1``, True a bare flag, a list several values."""
    flags: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return flags
