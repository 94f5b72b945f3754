"""The packages of a Python interpreter that is to run SGLang."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.core.extras import install_command

_PROBE = """
import importlib.metadata, importlib.util, json, os, runpy
def has(name):
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
torch = {}
if has("torch"):
    folder = os.path.dirname(importlib.util.find_spec("torch").origin)
    torch = runpy.run_path(os.path.join(folder, "version.py"))
gpu = any(torch.get(name) for name in ("cuda", "hip", "xpu"))
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    version = ""
print(json.dumps({"sglang": has("sglang"), "gpu": gpu, "kernels": has("sgl_kernel"), "version": version}))
"""
_PROBE_S = 60.0


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter and what it has installed; see `probe`."""

    python: Path
    """Path of the executable."""
    sglang: bool
    """SGLang is installed."""
    gpu: bool
    """Its torch is built for GPUs."""
    kernels: bool
    """SGLang's compiled kernels are installed, for any device."""
    version: str = ""
    """Version of SGLang; empty without its package's metadata."""

    @classmethod
    def probe(cls, python: Path) -> Interpreter:
        """Run the interpreter at ``python`` to find its packages, without importing them.

        Raises:
            ConfigError: it does not exist or does not run.
        """
        key = f"sampler.sglang.python={python}"
        try:
            probe = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{key} is not a working Python interpreter: {error}") from error
        if probe.returncode != 0:
            raise ConfigError(f"{key} is not a working Python interpreter:\n{probe.stderr[-500:]}")
        packages = json.loads(probe.stdout.splitlines()[-1])
        return cls(python, packages["sglang"], packages["gpu"], packages["kernels"], packages["version"])

    def require_sglang(self, chosen: bool) -> None:
        """Raise if SGLang is not installed.

        Args:
            chosen: the user configured this interpreter; otherwise the message lists all ways to get an engine.

        Raises:
            ConfigError: SGLang is not installed.
        """
        if self.sglang:
            return
        if chosen:
            raise ConfigError(f"sampler.sglang.python={self.python}: SGLang is not installed there")
        raise ConfigError(
            f"sampler.backend=sglang: SGLang is not installed; install it with `{install_command('sglang')}`, or set "
            "sampler.sglang.python to an interpreter that has it, or sampler.url to a running server, or "
            "sampler.backend=embedded"
        )
