"""Write the untrained policy (tokenizer and random weights) that ``--config search_r1/sft_base`` starts from.

``python -m agentrl_tasks.multihop.make_policy OUT``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl_tasks.small_policy import init_model


def make_policy(folder: Path, seed: int = 0) -> None:
    """Write a Qwen3 model of about 1.9M parameters in bfloat16, and its tokenizer, into ``folder``."""
    from .tokenizer import save_tokenizer

    init_model(folder, save_tokenizer(str(folder)), seed=seed)


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
