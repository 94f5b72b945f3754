"""The few names of SGLang's compiled kernels that its CPU paths use, in plain torch."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the KV cache locations of each request's new tokens.

    Args:
        req_pool_indices: ``[B]`` row of each request.
        req_to_token: ``[rows, pool_len]`` the table, changed in place.
        start_offset: ``[B]`` first new position of each request.
        end_offset: ``[B]`` the position after its last new one.
        out_cache_loc: locations of all new tokens, request after request.
        pool_len: columns of the table.
    """
    begin = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[begin : begin + end - start].to(req_to_token.dtype)
        begin += end - start


# SGLang's image processor of Qwen imports models that read these operators when they are imported. Nothing calls them.
_new_library: Any = torch.library.Library  # untyped in some versions of torch
_operators = _new_library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _operators.define(f"{_name}(Tensor x, Tensor y) -> ()")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises `NotImplementedError` when called: modules import more names than they use."""
    if name.startswith("__"):
        raise AttributeError(name)

    def raise_not_implemented(*arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not among agentrl's stand-ins for SGLang's kernels on a CPU")

    return raise_not_implemented
