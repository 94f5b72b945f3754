"""Fixes of Megatron-Core 0.16.1 without Transformer Engine and Apex.

One is for speed: in Megatron-Core the host waits for the norm of each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils


def apply_fixes() -> None:
    """Apply the fixes; repeated calls change nothing."""
    # Routing with a dtype compares this function of Transformer Engine with None, but imports it only if that is installed.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Latent attention takes the placeholders of Transformer Engine's classes for classes.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale


def _norm(size: int, flag: object, lists: Sequence[list[torch.Tensor]], per_tensor: bool) -> tuple[torch.Tensor, None]:
    """Return the norm ``[1]`` of the tensors in a list."""
    [tensors] = lists
    return torch.stack(torch._foreach_norm(tensors)).norm()[None], None


def _scale(size: int, flag: object, lists: Sequence[list[torch.Tensor]], factor: float) -> None:
    """Multiply tensors in place; ``lists`` has them twice, as inputs and as outputs."""
    inputs, outputs = lists
    assert all(source is target for source, target in zip(inputs, outputs, strict=True))
    torch._foreach_mul_(outputs, factor)
