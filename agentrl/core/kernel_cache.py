"""The folder of compiled GPU kernels, which all processes of all runs of a user share, so that each is compiled once."""

from __future__ import annotations

import os
from pathlib import Path

_VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "CUDA_CACHE_PATH": "cuda",
}
"""Environment variables of Triton, torch.compile, SGLang, DeepGEMM, FlashInfer, SGLang's own kernels and the CUDA driver, and
their folders. By default these are at seven places, torch.compile's in ``/tmp``, and do not all follow ``XDG_CACHE_HOME``."""


def kernel_folder() -> Path:
    """Return the folder: ``agentrl`` in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"


def share_kernels() -> None:
    """Let this process, and those that it starts, keep compiled kernels in `kernel_folder`; variables that are set stay."""
    for name, folder in _VARIABLES.items():
        os.environ.setdefault(name, str(kernel_folder() / folder))
