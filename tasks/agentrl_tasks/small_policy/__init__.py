"""Small untrained policies that call tools, for tasksets that ship a warm start: tokenizer, chat template, weights."""

from .model import PolicySize, init_model, run_command, save_policy
from .tokenizer import CHAT_TEMPLATE, save_tokenizer, tokenizer, train_bpe, wrap_tokenizer

__all__ = [
    "CHAT_TEMPLATE",
    "PolicySize",
    "init_model",
    "run_command",
    "save_policy",
    "save_tokenizer",
    "tokenizer",
    "train_bpe",
    "wrap_tokenizer",
]
