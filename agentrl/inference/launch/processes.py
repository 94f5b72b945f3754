"""Engine processes: start of the embedded engine and of SGLang, and detection of their end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from agentrl.config.sampler import EmbeddedConfig
from agentrl.core.child_process import LOOPBACK, ChildProcess, is_healthy, reserve_port, started_children
from agentrl.core.errors import AgentrlError, ConfigError, EngineError
from agentrl.distributed.sglang_loader import FOLDER, LOADERS
from agentrl.inference.launch import cpu_sglang
from agentrl.inference.launch.interpreter import Interpreter
from agentrl.inference.launch.kept_engines import KeptChild, try_lock, user_folder
from agentrl.inference.launch.startup_log import StartupLog, StartupPhase, last_error

GUARD = Path(__file__).with_name("guard.py")
"""Script that kills a program when its parent ends."""
_POLL_S = 0.02
_SLOW_POLL_S = 0.2
_MANY_LINES = 1000
_LONG_S = 20.0
"""A start that takes longer is logged, at every new phase and with growing intervals."""
_RESERVED_OPTIONS = {
    "port": "set sampler.port",
    "host": "an engine started by the run serves only this run; set sampler.url to use another one",
    "model": "set model.path",
    "model-path": "set model.path",
    "base-gpu-id": "the run gives each engine its GPUs; CUDA_VISIBLE_DEVICES limits them",
    "gpu-id-step": "the run gives each engine its GPUs; CUDA_VISIBLE_DEVICES limits them",
    "disaggregation-mode": "set sampler.groups.NAME.serves=prefill or decode",
    "disaggregation-bootstrap-port": "the run chooses a free port",
    "node-rank": "the run sets it on each of the engine's machines; set sampler.sglang.nnodes",
    "dist-init-addr": "the run chooses where the engine's machines meet; set sampler.sglang.nnodes",
    "nccl-init-addr": "the run chooses where the engine's machines meet; set sampler.sglang.nnodes",
}
"""Options of SGLang that ``sampler.sglang`` must not contain, and what to set instead."""

StartChild = Callable[..., ChildProcess]


@dataclass(frozen=True, slots=True)
class EngineMachine:
    """A machine of an engine that has several."""

    rank: int
    """Among them; the first one's server has the engine's URL."""
    meeting: str
    """``host:port`` of the first machine, where their processes meet."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An engine process on this machine."""

    url: str
    """Base URL, such as ``http://127.0.0.1:30000``."""
    child: ChildProcess
    """The process."""
    grace_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL; 0 for SGLang, which would log a crash after SIGTERM."""
    start_details: str = ""
    """What its start consisted of."""

    @property
    def log(self) -> str:
        """Path of its log."""
        return str(self.child.log)

    def check(self) -> None:
        """Raise `EngineError` with the last error and the last lines of the log if the process has ended."""
        try:
            self.child.check()
        except EngineError as error:
            # SGLang logs many lines after the error that ended it.
            reason = last_error(self.log_tail(_MANY_LINES))
            raise EngineError(f"{error}\nThe last error in it: {reason}" if reason else str(error)) from None

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""
        return self.child.log_tail(lines)

    def release(self) -> None:
        """Leave it to the next run if it is kept, otherwise stop it; nothing is in progress."""
        if isinstance(self.child, KeptChild):
            self.child.release()
        else:
            self.stop()

    def stop(self) -> None:
        """Terminate it and all of its child processes."""
        self.child.stop(self.grace_s)

    def kill(self) -> None:
        """Kill it and all of its child processes at once."""
        self.child.stop(0.0)


def launch_embedded(  # what a start needs besides the engine's own options
    model: Path,
    config: EmbeddedConfig | None = None,
    *,
    log: Path,
    host: str = LOOPBACK,
    port: int = 0,
    seed: int = 0,
    version: int = 0,
    trust_remote_code: bool = False,
    restores_weights: bool = False,
    timeout_s: float = 300.0,
    start_child: StartChild = ChildProcess.start,
) -> EngineProcess:
    """Start the embedded engine on a model folder and wait until it is healthy.

    Args:
        model: Hugging Face folder.
        config: ``sampler.embedded``; its defaults if None.
        log: file for its output.
        host: address of this machine on which it listens.
        port: 0 chooses a free port.
        seed: seed of requests without a seed.
        version: policy version of the weights in the folder.
        trust_remote_code: run Python code of the folder if the tokenizer needs it.
        restores_weights: resumed weights are those that were released.
        timeout_s: timeout of the start in seconds.
        start_child: starts the process, as `ChildProcess.start` does.

    Raises:
        PortInUseError: another process listens on ``port``.
        EngineError: it ended or did not become healthy in time; the message has its last log lines.
    """
    config = config or EmbeddedConfig()
    flags = {
        "model": model,
        "dtype": config.dtype,
        "max-slots": config.slots,
        "max-context": config.context,
        "threads": config.threads,
        "seed": seed,
        "weight-version": version,
        "batch-invariant": config.batch_invariant,
        "trust-remote-code": trust_remote_code,
        "weights-cpu-backup": restores_weights,
    }
    command = [sys.executable, "-m", "agentrl.inference.embedded", *command_flags(flags)]
    # Large models share matrix products among OpenMP threads. If these spin while they wait, the engine becomes many
    # times slower as soon as another process needs the cores.
    env = {"OMP_NUM_THREADS": str(config.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    begun = time.monotonic()
    port_file = log.with_name(log.name + ".port")
    port_file.unlink(missing_ok=True)
    with reserve_port(host, port, key="sampler.port"):
        pass
    command += ["--host", host, "--port", str(port), "--port-file", str(port_file)]
    child = start_child(command, log=log, name="the embedded engine", env=env, error=EngineError)
    url = f"http://{host}:{_wait_for_port(port_file, child, begun + timeout_s) or port}"
    child.wait_healthy(f"{url}/health", timeout_s - (time.monotonic() - begun))
    return EngineProcess(url, child)


def _wait_for_port(port_file: Path, child: ChildProcess, deadline: float) -> int | None:
    """Return the port that the engine has bound; None if it ended, or at the deadline.

    The engine chooses the port itself: a free port chosen here could be taken before the engine binds it.
    """
    while not port_file.exists():
        if not child.alive() or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return int(port_file.read_text())


def launch_sglang(  # what a start needs besides SGLang's own options, of which there are hundreds
    model: Path,
    *,
    log: Path,
    host: str = LOOPBACK,
    port: int = 0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    python: Path | None = None,
    gpus: Sequence[str] = (),
    machine: EngineMachine | None = None,
    disaggregation: str = "",
    timeout_s: float = 600.0,
    start_child: StartChild = ChildProcess.start,
) -> EngineProcess:
    """Start ``sglang.launch_server`` on a model folder and wait until it is healthy.

    A slow start is logged as warnings. With the option ``device: cpu`` and an interpreter whose torch is built without
    GPU support, the stand-ins of `agentrl.inference.launch.cpu_sglang` are used.

    Args:
        model: Hugging Face folder.
        log: file for its output.
        host: address of this machine on which it listens.
        port: 0 chooses a free port.
        seed: seed of requests without a seed.
        options: SGLang's options: ``{"mem_fraction_static": 0.5}`` becomes ``--mem-fraction-static 0.5``, True a flag
            without a value, a list several values.
        python: interpreter that runs it; agentrl need not be installed there. None: this one.
        gpus: GPUs of the engine, as in ``CUDA_VISIBLE_DEVICES``, in the order of its ranks; empty: the variable is not set.
        machine: this one, for an engine of several, which are started at the same time; with the option ``nnodes``.
        disaggregation: ``prefill`` or ``decode``; empty: the engine does both. One for prefill has a bootstrap server on a free
            port of ``host``, at which engines for decode fetch what it has computed.
        timeout_s: timeout of the start in seconds.
        start_child: starts the process, as `ChildProcess.start` does.

    Raises:
        ConfigError: SGLang is not installed there, or refuses an option.
        PortInUseError: another process listens on ``port``.
        EngineError: it ended or did not become healthy in time; the message has the phase, the cause if it was out of
            memory, and its last log lines.
    """
    options = options or {}
    _check_options(options)
    if machine is None and int(_with_dashes(options).get("nnodes") or 1) > 1:
        raise ConfigError(
            f"sampler.sglang.nnodes={_with_dashes(options)['nnodes']}: this engine is on one machine; only the policy's engines, "
            "with placement.mode=disaggregate or colocate, have several"
        )
    interpreter = Interpreter.probe(python or Path(sys.executable))
    interpreter.require_sglang(chosen=python is not None)
    flags, env = _flags_and_environment(options, interpreter)
    flags = {"model-path": model, "random-seed": seed} | flags
    if machine is not None:
        flags |= {"node-rank": machine.rank, "dist-init-addr": machine.meeting}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    guard = [sys.executable, "-S", str(GUARD)]
    begun = time.monotonic()
    with ExitStack() as locks, ExitStack() as ports:
        # Machines of an engine wait for each other, and must not wait for other engines meanwhile.
        if machine is None and flags.get("max-total-tokens") is None:
            locks.enter_context(_gpus_locked(gpus, timeout_s))
        waited_s = time.monotonic() - begun
        port_number = ports.enter_context(reserve_port(host, port, key="sampler.port"))
        if disaggregation:
            flags["disaggregation-mode"] = disaggregation
        if disaggregation == "prefill":
            flags["disaggregation-bootstrap-port"] = ports.enter_context(reserve_port(host))
        server = [str(interpreter.python), "-m", "sglang.launch_server", *command_flags(flags)]
        command = [*guard, *server, "--host", host, "--port", str(port_number)]
        startup_log = StartupLog(log)
        child = start_child(command, log=log, name="SGLang", env=env, error=EngineError)
        engine = EngineProcess(f"http://{host}:{port_number}", child, grace_s=0.0)
        try:
            _wait_healthy(engine, startup_log, options, timeout_s, has_memory=locks.close)
        except BaseException:
            engine.stop()
            raise
    waited = f"waiting for other engines on its GPUs {waited_s:.1f}, " if waited_s >= 1.0 else ""
    return replace(engine, start_details=waited + startup_log.phase_times())


@contextmanager
def _gpus_locked(gpus: Sequence[str], timeout_s: float) -> Iterator[None]:
    """Wait for other engines that take memory of these GPUs, and let those that start later wait.

    SGLang sizes its KV cache by the free memory before and after it loads its weights. What another engine takes between the
    two is missing in the cache, or leaves none. With ``max_total_tokens`` the cache has that size whatever the others take, as
    long as ``mem_fraction_static`` has room for both.

    Raises:
        EngineError: others take longer than ``timeout_s``, or this start was cancelled.
    """
    children, deadline = started_children.get(), time.monotonic() + timeout_s
    with ExitStack() as locks:
        for gpu in sorted(set(gpus)):
            file = user_folder() / f"gpu-{gpu.replace('/', '-')}.lock"
            file.touch()
            while (lock := try_lock(file)) is None:
                if children is not None and children.ended:
                    raise EngineError("the start was cancelled")
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"SGLang is not started: for {timeout_s:g} s other engines have been loading weights on GPU {gpu} "
                        f"({file} is locked); end them, raise sampler.start_timeout_s, or set sampler.sglang.max_total_tokens"
                    )
                time.sleep(_SLOW_POLL_S)
            locks.callback(os.close, lock)
        yield


def _flags_and_environment(
    options: Mapping[str, Any], interpreter: Interpreter
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return flags of the server and variables of its environment for SGLang's options and the interpreter that runs it."""
    flags: dict[str, Any] = {}
    env = {
        # Otherwise it samples a token for each request of /health, and answers after more than a second.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # Log-probabilities are those at the temperature, whatever the user's environment has for other programs.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
    }
    if options.get("device") == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        if not interpreter.gpu and not interpreter.kernels:
            env |= cpu_sglang.environment()
            flags |= _with_dashes(cpu_sglang.OPTIONS)
    flags |= _with_dashes(options)
    if set(LOADERS) & set(flags.get("custom-weight-loader") or []):
        env["PYTHONPATH"] = _with_loader(env.get("PYTHONPATH", os.environ.get("PYTHONPATH")))
    return flags, env


def _with_loader(path: str | None) -> str:
    """Return the module path with the folder of agentrl's weight loader."""
    return os.pathsep.join([str(FOLDER), *filter(None, [path])])


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options of SGLang that the run sets."""
    for name in options:
        key = _RESERVED_OPTIONS.get(name.replace("_", "-"))
        if key is not None:
            raise ConfigError(f"sampler.sglang.{name}={options[name]}: {key}")


def _wait_healthy(
    engine: EngineProcess,
    startup_log: StartupLog,
    options: Mapping[str, Any],
    timeout_s: float,
    has_memory: Callable[[], None],
) -> None:
    """Block until the server is healthy; call ``has_memory`` at every look once it has weights and KV cache.

    Raises:
        ConfigError: it refuses an option.
        EngineError: it ended, or is not healthy after ``timeout_s``.
    """
    begun = time.monotonic()
    peak = 0
    logged: tuple[StartupPhase, float] = (StartupPhase.IMPORTS, 0.0)
    while not is_healthy(f"{engine.url}/health"):
        seconds = time.monotonic() - begun
        code = engine.child.exit_code()
        phase = startup_log.read()
        if code is not None or seconds > timeout_s:
            raise _startup_error(startup_log, options, code, peak, timeout_s)
        if phase > StartupPhase.CACHE:
            has_memory()
        peak = max(peak, _resident_bytes(engine.child.pid))
        if seconds > _LONG_S and (phase is not logged[0] or seconds > 2 * logged[1]):
            _log.warning("SGLang is not healthy after %.0f s: %s (log: %s)", seconds, phase.words, startup_log.log)
            logged = (phase, seconds)
        time.sleep(_SLOW_POLL_S)


def _startup_error(
    startup_log: StartupLog, options: Mapping[str, Any], code: int | None, host_peak: int, timeout_s: float
) -> AgentrlError:
    """Return the error of a failed start; ``code`` is the exit status, None after a timeout."""
    if refused := startup_log.wrong_option(options):
        return ConfigError(f"{refused}. The end of its log {startup_log.log}:\n{startup_log.tail(3)}")
    phase = startup_log.phase.words
    if code is None:
        message = (
            f"SGLang does not answer after {timeout_s:g} s, {phase}; raise sampler.start_timeout_s if it needs longer"
        )
    elif code < 0:
        message = f"SGLang ended while {phase} (signal {signal.Signals(-code).name})"
    else:
        message = f"SGLang ended while {phase} (exit status {code})"
    reason = startup_log.out_of_memory(code, host_peak) or last_error(startup_log.text)
    cause = f": {reason}" if reason else ""
    return EngineError(f"{message}{cause}. The end of its log {startup_log.log}:\n{startup_log.tail()}")


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and all of its descendants; processes that have ended count 0."""
    total = 0
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(pid)
        for process in [leader, *leader.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += int(process.memory_info().rss)
    return total


def _with_dashes(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in options.items()}


def command_flags(options: Mapping[str, Any]) -> list[str]:
    """Return command line arguments: ``some_name: 1`` is ``--some-name 1``, True a flag without value, a list several values."""
    flags: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return flags
