"""What a Python interpreter that is to run SGLang has installed."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.errors import ConfigError

_PROBE = """
import importlib.util, json, os, runpy
def has(name):
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
torch = {}
if has("torch"):
    folder = os.path.dirname(importlib.util.find_spec("torch").origin)
    torch = runpy.run_path(os.path.join(folder, "version.py"))
gpu = any(torch.get(name) for name in ("cuda", "hip", "xpu"))
print(json.dumps({"sglang": has("sglang"), "gpu": gpu, "kernels": has("sgl_kernel")}))
"""
_PROBE_S = 60.0


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter; made by `look`."""

    python: Path
    """Its path."""
    sglang: bool
    """SGLang is installed there."""
    gpu: bool
    """Its torch is built for GPUs."""
    kernels: bool
    """SGLang's compiled kernels are installed there, for whichever device."""

    @classmethod
    def look(cls, python: Path) -> Interpreter:
        """Ask the interpreter at ``python``; nothing heavy is imported there.

        Raises:
            ConfigError: there is none, or it does not run.
        """
        key = f"sampler.sglang.python={python}"
        try:
            probe = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{key} is no Python interpreter that runs: {error}") from error
        if probe.returncode != 0:
            raise ConfigError(f"{key} is no Python interpreter that runs:\n{probe.stderr[-500:]}")
        found = json.loads(probe.stdout.splitlines()[-1])
        return cls(python, bool(found["sglang"]), bool(found["gpu"]), bool(found["kernels"]))

    def require_sglang(self, chosen: bool) -> None:
        """Refuse an interpreter without SGLang.

        Args:
            chosen: the user named it, so that what it lacks is to be installed there.

        Raises:
            ConfigError: SGLang is not installed.
        """
        if self.sglang:
            return
        if chosen:
            raise ConfigError(f"sampler.sglang.python={self.python}: SGLang is not installed there")
        raise ConfigError(
            "sampler.backend=sglang: SGLang is not installed; install it with `pip install 'agentrl[sglang]'`, or set "
            "sampler.sglang.python to an interpreter that has it, or sampler.url to a running server, or "
            "sampler.backend=embedded"
        )
