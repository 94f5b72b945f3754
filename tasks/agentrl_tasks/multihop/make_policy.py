"""Write the untrained policy (tokenizer and random weights) that ``--config search_r1/sft_base`` starts from.

``python -m agentrl_tasks.multihop.make_policy OUT``
"""

from __future__ import annotations

from pathlib import Path

from agentrl_tasks.small_policy import init_model, run_command


def make_policy(folder: Path, seed: int = 0) -> None:
    """Write a Qwen3 model of about 1.9M parameters in bfloat16, and its tokenizer, into ``folder``."""
    from .tokenizer import save_tokenizer

    init_model(folder, save_tokenizer(folder), seed=seed)


def main() -> None:
    """Run from the command line."""
    run_command(__doc__, make_policy)


if __name__ == "__main__":
    main()
