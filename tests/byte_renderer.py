"""A renderer with one token a byte, for any chat template."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer


def byte_renderer(template: str) -> ChatRenderer:
    """Return the renderer of a chat template with one token a byte."""
    return make_renderer(byte_tokenizer(template))


def byte_tokenizer(template: str) -> Any:
    """Return a tokenizer with one token a byte."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    base = Tokenizer(models.BPE(vocabulary, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    return chat_tokenizer(base, template)


def chat_tokenizer(base: Tokenizer, template: str) -> Any:
    """Return a tokenizer with a chat template and the special tokens of ChatML."""
    tokenizer_class: Any = PreTrainedTokenizerFast  # its constructor is not typed
    tokenizer = tokenizer_class(tokenizer_object=base, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template
    return tokenizer
