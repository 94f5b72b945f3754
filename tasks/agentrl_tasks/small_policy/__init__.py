"""Small untrained policies that call tools, for tasksets that ship a warm start: tokenizer, chat template, weights."""

from .model import PolicySize, init_model, run_command, save_marker_policy, save_policy
from .tokenizer import CHAT_TEMPLATE, marker_bpe, save_tokenizer, tokenizer, train_bpe, wrap_tokenizer

__all__ = [
    "CHAT_TEMPLATE",
    "PolicySize",
    "init_model",
    "marker_bpe",
    "run_command",
    "save_marker_policy",
    "save_policy",
    "save_tokenizer",
    "tokenizer",
    "train_bpe",
    "wrap_tokenizer",
]
