"""What SGLang's log tells of its start: how far it is, and why it failed."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_GIB = 1 << 30


class Phase(enum.IntEnum):
    """How far a start is."""

    IMPORTS = 0
    WEIGHTS = 1
    CACHE = 2
    GRAPHS = 3
    WARM_UP = 4

    @property
    def words(self) -> str:
        """What the server does in it."""
        return _WORDS[self]


_WORDS = {
    Phase.IMPORTS: "importing its modules",
    Phase.WEIGHTS: "loading weights",
    Phase.CACHE: "making the KV cache",
    Phase.GRAPHS: "capturing CUDA graphs",
    Phase.WARM_UP: "warming up",
}
_MARKS = (
    (re.compile(r"Load weight begin"), Phase.WEIGHTS),
    (re.compile(r"Load weight end"), Phase.CACHE),
    (re.compile(r"Capture .*graph begin"), Phase.GRAPHS),
    (re.compile(r"Application startup complete|Uvicorn running on"), Phase.WARM_UP),
)
_SIZE = r"([\d.]+ [KMGT]iB)"
_DEVICE_OOM = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory|(?:CUDA|HIP) error: out of memory|\[CUDA\]: out of memory|cudaErrorMemoryAllocation"
)
_NO_ROOM = re.compile(r"Not enough memory\. Please try to increase|Loaded weights leave no GPU memory")
_HOST_OOM = re.compile(r"DefaultCPUAllocator: |^MemoryError|Cannot allocate memory|\(exit code: -9\)", re.MULTILINE)
_SHORT = {
    Phase.IMPORTS: "something else occupies the GPU",
    Phase.WEIGHTS: (
        "the model is too large for what is free there: raise sampler.sglang.tp_size, choose a smaller sampler.sglang.dtype or "
        "sampler.sglang.quantization, or free the GPU"
    ),
    Phase.CACHE: "lower sampler.sglang.mem_fraction_static, or sampler.sglang.max_total_tokens",
    Phase.GRAPHS: "lower sampler.sglang.mem_fraction_static, or sampler.sglang.cuda_graph_max_bs",
    Phase.WARM_UP: "lower sampler.sglang.mem_fraction_static, or sampler.sglang.chunked_prefill_size",
}
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)
_UNKNOWN = re.compile(r"error: (?:unrecognized arguments|ambiguous option): (.+)$", re.MULTILINE)
_VALUE = re.compile(r"error: argument ((?:-[\w-]+/?)+): (.+)$", re.MULTILINE)


class StartLog:
    """The part of a log that one start writes."""

    def __init__(self, log: Path) -> None:
        """Begin at the present end of ``log``: an earlier start may have written to it too."""
        self.log = log
        self.text = ""
        self.phase = Phase.IMPORTS
        self._at = log.stat().st_size if log.exists() else 0

    def read(self) -> Phase:
        """Take in what was written since the last call, and return how far the start is."""
        with self.log.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        self._at += len(new)
        self.text += new.decode(errors="replace")
        tail = self.text[-len(new) - 200 :]  # a mark may have been cut in two
        self.phase = max([self.phase, *(phase for mark, phase in _MARKS if mark.search(tail))])
        return self.phase

    def tail(self, lines: int = 20) -> str:
        """Return its last lines."""
        return "\n".join(self.text.splitlines()[-lines:])

    def wrong_option(self, options: Mapping[str, Any]) -> str | None:
        """Return which of the user's ``options`` the server refused, by its key, or None."""
        if found := _UNKNOWN.search(self.text):
            names = re.findall(r"--([\w-]+)", found[1].partition(" could match")[0])
            keys = ", ".join(f"sampler.sglang.{_given(name, options)}" for name in names) or found[1]
            return f"{keys}: SGLang refuses it ({found[0].removeprefix('error: ')})"
        if found := _VALUE.search(self.text):
            names = [name.lstrip("-") for name in found[1].split("/")]
            given = {_given(name, options) for name in names} & set(options)
            name = min(given) if given else names[0].replace("-", "_")
            return f"sampler.sglang.{name}: SGLang refuses its value ({found[2]})"
        return None

    def out_of_memory(self, exit_code: int | None, host_peak: int) -> str | None:
        """Return what was out of memory, in which phase, the peak, and the key to change; None where memory was not it.

        Args:
            exit_code: of the server; None while it runs.
            host_peak: most bytes of host memory that the server was seen to use.
        """
        phase = self.phase
        if _NO_ROOM.search(self.text):
            return (
                f"no GPU memory is left for the KV cache after loading weights{_figures(self.text)}: raise "
                "sampler.sglang.mem_fraction_static, raise sampler.sglang.tp_size, or free the GPU"
            )
        if _DEVICE_OOM.search(self.text):
            return f"the GPU was out of memory while {phase.words}{_figures(self.text)}: {_SHORT[phase]}"
        # A scheduler that fails kills its parent by SIGKILL too, but not without a word.
        silent = exit_code == -9 and "Traceback" not in self.text and "SIGQUIT" not in self.text
        if silent or _HOST_OOM.search(self.text):
            what = (
                "lower sampler.sglang.max_total_tokens, or give the machine more"
                if phase >= Phase.CACHE
                else ("the machine has too little for the model")
            )
            seen = f"; it was seen to use {host_peak / _GIB:.1f} GiB" if host_peak else ""
            sure = "ran out of host memory" if not silent else "was killed by SIGKILL, as a host out of memory does,"
            return f"the server {sure} while {phase.words}{seen}: {what}"
        return None


def last_error(text: str) -> str | None:
    """Return the last line of a log that names an exception."""
    found = _ERROR_LINE.findall(text)
    return str(found[-1])[:500] if found else None


def _given(name: str, options: Mapping[str, Any]) -> str:
    """Return an option as the user wrote it."""
    return next((key for key in options if key.replace("_", "-") == name), name.replace("-", "_"))


def _figures(text: str) -> str:
    """Return the sizes that an error names."""
    named = {
        "it asked for {}": rf"Tried to allocate {_SIZE}",
        "the GPU has {}": rf"total capacity of {_SIZE}",
        "{} were free": rf"of which {_SIZE} is free",
        "the peak was {}": rf"this process has {_SIZE} memory in use",
        "{} of it PyTorch's": rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
        "mem_fraction_static was {}": r"mem.fraction.static=([\d.]*\d)",
    }
    found = [(words, re.search(pattern, text)) for words, pattern in named.items()]
    told = ", ".join(words.format(match[1]) for words, match in found if match)
    return f" ({told})" if told else ""
