"""SGLang's log during its start: the phase, and the cause of a failure."""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_GIB = 1 << 30


class StartupPhase(enum.IntEnum):
    """Phase of a start, in order."""

    IMPORTS = 0
    WEIGHTS = 1
    CACHE = 2
    GRAPHS = 3
    WARM_UP = 4

    @property
    def words(self) -> str:
        """What the server does in this phase."""
        return _WORDS[self]


_WORDS = {
    StartupPhase.IMPORTS: "importing its modules",
    StartupPhase.WEIGHTS: "loading weights",
    StartupPhase.CACHE: "making the KV cache",
    StartupPhase.GRAPHS: "capturing CUDA graphs",
    StartupPhase.WARM_UP: "warming up",
}
_MARKS = (
    (re.compile(r"Load weight begin"), StartupPhase.WEIGHTS),
    (re.compile(r"Load weight end"), StartupPhase.CACHE),
    (re.compile(r"Capture .*graph begin"), StartupPhase.GRAPHS),
    (re.compile(r"Application startup complete|Uvicorn running on"), StartupPhase.WARM_UP),
)
_SIZE = r"([\d.]+ [KMGT]iB)"
_DEVICE_OOM = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory|(?:CUDA|HIP) error: out of memory|\[CUDA\]: out of memory|cudaErrorMemoryAllocation"
)
_NO_CACHE_MEMORY = re.compile(r"Not enough memory\. Please try to increase|Loaded weights leave no GPU memory")
_HOST_OOM = re.compile(r"DefaultCPUAllocator: |^MemoryError|Cannot allocate memory|\(exit code: -9\)", re.MULTILINE)
_GPU_MEMORY_ADVICE = {
    StartupPhase.IMPORTS: "something else occupies the GPU",
    StartupPhase.WEIGHTS: (
        "the model is too large for what is free there: raise sampler.sglang.tp_size, choose a smaller sampler.sglang.dtype or "
        "sampler.sglang.quantization, or free the GPU"
    ),
    StartupPhase.CACHE: "lower sampler.sglang.mem_fraction_static, or sampler.sglang.max_total_tokens",
    StartupPhase.GRAPHS: "lower sampler.sglang.mem_fraction_static, or sampler.sglang.cuda_graph_max_bs",
    StartupPhase.WARM_UP: "lower sampler.sglang.mem_fraction_static, or sampler.sglang.chunked_prefill_size",
}
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)
_UNKNOWN = re.compile(r"error: (?:unrecognized arguments|ambiguous option): (.+)$", re.MULTILINE)
_VALUE = re.compile(r"error: argument ((?:-[\w-]+/?)+): (.+)$", re.MULTILINE)


class StartupLog:
    """The lines of a log that one start has written."""

    def __init__(self, log: Path) -> None:
        """Read from the current end of ``log``: earlier starts write to the same file."""
        self.log = log
        self.text = ""
        self.phase = StartupPhase.IMPORTS
        self._began = {StartupPhase.IMPORTS: time.monotonic()}
        """When each phase was first seen."""
        self._at = log.stat().st_size if log.exists() else 0

    def read(self) -> StartupPhase:
        """Read the lines written since the last call, and return the current phase."""
        with self.log.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        self._at += len(new)
        self.text += new.decode(errors="replace")
        tail = self.text[-len(new) - 200 :]  # a mark may span two reads
        self.phase = max([self.phase, *(phase for mark, phase in _MARKS if mark.search(tail))])
        self._began.setdefault(self.phase, time.monotonic())
        return self.phase

    def phase_times(self) -> str:
        """Return the seconds of each phase of a start that has ended now."""
        ends = [*list(self._began.values())[1:], time.monotonic()]
        return ", ".join(
            f"{phase.words} {end - began:.1f}" for (phase, began), end in zip(self._began.items(), ends, strict=True)
        )

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of this start."""
        return "\n".join(self.text.splitlines()[-lines:])

    def wrong_option(self, options: Mapping[str, Any]) -> str | None:
        """Return a message with the configuration key of an option that the server refused, or None."""
        if match := _UNKNOWN.search(self.text):
            names = re.findall(r"--([\w-]+)", match[1].partition(" could match")[0])
            keys = ", ".join(f"sampler.sglang.{_as_configured(name, options)}" for name in names) or match[1]
            return f"{keys}: SGLang refuses it ({match[0].removeprefix('error: ')})"
        if match := _VALUE.search(self.text):
            names = [name.lstrip("-") for name in match[1].split("/")]
            configured_names = {_as_configured(name, options) for name in names} & set(options)
            name = min(configured_names) if configured_names else names[0].replace("-", "_")
            return f"sampler.sglang.{name}: SGLang refuses its value ({match[2]})"
        return None

    def out_of_memory(self, exit_code: int | None, host_peak: int) -> str | None:
        """Return a message with the memory that was exhausted, the phase, the peak and the key to change, or None.

        Args:
            exit_code: exit code of the server; None while it runs.
            host_peak: largest resident memory of the server that was measured, in bytes.
        """
        phase = self.phase
        if _NO_CACHE_MEMORY.search(self.text):
            return (
                f"no GPU memory is left for the KV cache after loading weights{_memory_sizes(self.text)}: raise "
                "sampler.sglang.mem_fraction_static, raise sampler.sglang.tp_size, or free the GPU"
            )
        if _DEVICE_OOM.search(self.text):
            return (
                f"the GPU was out of memory while {phase.words}{_memory_sizes(self.text)}: {_GPU_MEMORY_ADVICE[phase]}"
            )
        # A scheduler process that fails also kills its parent by SIGKILL, but logs a traceback before.
        silent = exit_code == -9 and "Traceback" not in self.text and "SIGQUIT" not in self.text
        if silent or _HOST_OOM.search(self.text):
            remedy = (
                "lower sampler.sglang.max_total_tokens, or give the machine more"
                if phase >= StartupPhase.CACHE
                else ("the machine has too little for the model")
            )
            seen = f"; its measured peak was {host_peak / _GIB:.1f} GiB" if host_peak else ""
            sure = "ran out of host memory" if not silent else "was killed by SIGKILL, as a host out of memory does,"
            return f"the server {sure} while {phase.words}{seen}: {remedy}"
        return None


def last_error(text: str) -> str | None:
    """Return the last line of a log that names an exception."""
    error_lines = _ERROR_LINE.findall(text)
    return str(error_lines[-1])[:500] if error_lines else None


def _as_configured(name: str, options: Mapping[str, Any]) -> str:
    """Return an option with the spelling of the user."""
    return next((key for key in options if key.replace("_", "-") == name), name.replace("-", "_"))


def _memory_sizes(text: str) -> str:
    patterns = {
        "it tried to allocate {}": rf"Tried to allocate {_SIZE}",
        "the GPU has {}": rf"total capacity of {_SIZE}",
        "{} were free": rf"of which {_SIZE} is free",
        "the peak was {}": rf"this process has {_SIZE} memory in use",
        "{} of it PyTorch's": rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
        "mem_fraction_static was {}": r"mem.fraction.static=([\d.]*\d)",
    }
    matches = [(words, re.search(pattern, text)) for words, pattern in patterns.items()]
    sizes = ", ".join(words.format(match[1]) for words, match in matches if match)
    return f" ({sizes})" if sizes else ""
