"""Faults of Megatron-Core 0.16.1 without Transformer Engine, mended where they exist."""

from __future__ import annotations

from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils


def mend() -> None:
    """Mend the faults; more than once changes nothing."""
    # Routing with a dtype asks whether this function of Transformer Engine is None, but only imports it if that is there.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Latent attention takes the placeholders of Transformer Engine's classes for classes.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
