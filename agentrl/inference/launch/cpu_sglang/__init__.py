"""Runs the stock SGLang wheel, which is built for GPUs, on a CPU. For tests, and for trying a configuration out.

``path/`` goes on the interpreter's module path: stand-ins for what cannot be loaded there. ``requirements.txt`` is what
such an interpreter's environment holds beside torch; ``make test-sglang`` builds one. A real CPU build of SGLang brings
its own kernels and needs none of this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
OPTIONS: Mapping[str, object] = {
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "dtype": "float32",
    "grammar_backend": "none",
    # Half of the memory, 16 GB, without a number.
    "max_total_tokens": 65536,
    # An idle scheduler would keep a core busy.
    "sleep_on_idle": True,
}
"""Options of the server that a CPU needs, unless the user gives others."""


def environment() -> dict[str, str]:
    """Return the variables that the server's process needs beside this process's."""
    path = [str(FOLDER / "path"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        # Without it, all of SGLang's model files are imported, some of which cannot be.
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "agentrl_cpu_models",
        # Threads that spin while they wait take the cores from everybody else.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
