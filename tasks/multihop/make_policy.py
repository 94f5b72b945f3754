"""Write the untrained policy, tokenizer and random weights, that ``configs/search_r1/sft_base.yaml`` starts from.

``python -m agentrl_tasks.multihop.make_policy OUT``
"""

from __future__ import annotations

import argparse
from pathlib import Path


def make_policy(folder: Path, seed: int = 0) -> None:
    """Write a Qwen3 model of about 1.9M parameters in bfloat16, and its tokenizer, into ``folder``."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from .tokenizer import save_tokenizer

    tokenizer = save_tokenizer(str(folder))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.03,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_policy(arguments.out, arguments.seed)
    print(f"untrained policy: {arguments.out}")


if __name__ == "__main__":
    main()
