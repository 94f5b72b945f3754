"""Runs the published SGLang wheel, which is built for GPUs, on a CPU: for tests, and to try a configuration.

``path/`` is added to the interpreter's module path: stand-ins for modules that cannot be loaded without a GPU.
``requirements.txt`` are the packages of such an environment besides torch; ``make test-sglang`` builds one. A CPU build of
SGLang has its own kernels and does not need this.
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
    "lora_backend": "torch_native",
    # By default half of the memory, here 16 GB.
    "max_total_tokens": 65536,
    # Otherwise an idle scheduler keeps a core busy.
    "sleep_on_idle": True,
}
"""Default options of the server on a CPU."""


def environment() -> dict[str, str]:
    """Return additional environment variables for the server's process."""
    path = [str(FOLDER / "path"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        # Without it, all of SGLang's model files are imported, some of which cannot be.
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "agentrl_cpu_models",
        # Threads that spin while they wait take the cores from other processes.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
