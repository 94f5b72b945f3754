"""DeepSeek V3, V3.1 and R1, Kimi K2 and Moonlight: multi-head latent attention, mixtures of experts with a sigmoid router."""

from __future__ import annotations

from typing import Any

from agentrl.core.errors import ModelError
from agentrl.learner.megatron.families.base import Family, Options, Weight, at_layer, dense_options, norms, refuse, same
from agentrl.learner.megatron.families.experts import expert, sigmoid_layer, sigmoid_options


def _options(hf: Any) -> Options:
    refuse(hf, "attention_bias")
    if not hf.rope_interleave:
        raise ModelError(
            "rope_interleave=false in config.json: the megatron learner lacks it; set learner.backend=fsdp"
        )
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "qk_layernorm": True,
        # For the scale of the softmax; transformers computes the frequencies.
        "rotary_scaling_factor": hf.rope_parameters.get("factor", 1.0),
        "mscale_all_dim": hf.rope_parameters.get("mscale_all_dim", 0.0),
    }
    return dense_options(hf) | latent | sigmoid_options(hf)


def _layer(hf: Any, layer: int) -> list[Weight]:
    return [*norms(hf, layer), *_attention(hf, layer), *sigmoid_layer(hf, layer)]


def _attention(hf: Any, layer: int) -> list[Weight]:
    """Return the projections to and from the latents. All are divided by rows, but the output."""
    at, heads, hidden = at_layer(layer), hf.num_attention_heads, hf.hidden_size
    queries, latent = heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim), hf.kv_lora_rank
    shapes = {
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", latent + hf.qk_rope_head_dim, hidden),
        "linear_kv_up_proj": ("kv_b_proj", heads * (hf.qk_nope_head_dim + hf.v_head_dim), latent),
    }
    norms = {"kv": latent}
    if hf.q_lora_rank is None:
        shapes["linear_q_proj"] = ("q_proj", queries, hidden)
    else:
        norms["q"] = hf.q_lora_rank
        shapes["linear_q_down_proj"] = ("q_a_proj", hf.q_lora_rank, hidden)
        shapes["linear_q_up_proj"] = ("q_b_proj", queries, hf.q_lora_rank)
    return [
        *(
            same(f"self_attention.{name}.weight", at(f"self_attn.{hf_name}.weight", *shape), "rows")
            for name, (hf_name, *shape) in shapes.items()
        ),
        *(
            same(f"self_attention.{name}_layernorm.weight", at(f"self_attn.{name}_a_layernorm.weight", size))
            for name, size in norms.items()
        ),
        same(
            "self_attention.linear_proj.weight", at("self_attn.o_proj.weight", hidden, heads * hf.v_head_dim), "columns"
        ),
    ]


FAMILY = Family("deepseek_v3", _options, _layer, expert)
