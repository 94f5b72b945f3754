"""Options of SGLang's engines in the tests on a GPU, and how long these wait for one to start."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    # bfloat16 rounds a logit of 16 by up to a sixteenth, which is as much as all else together.
    "enable_fp32_lm_head": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 65536,
    # Batches up to 8 go through CUDA graphs, larger ones do not: both are looked at, and few graphs are made.
    "cuda_graph_max_bs": 8,
    "disable_piecewise_cuda_graph": True,
    "enable_memory_saver": True,
}
START_S = 240.0
"""Seconds until an engine must have started."""
