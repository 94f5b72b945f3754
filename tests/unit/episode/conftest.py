import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{{ loop.revindex }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Numbers messages from the end, so every turn must be rendered again."""

COUNTS = (
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Begins with the number of user messages, so every user message changes all before it."""


def renderer_of(template: str) -> ChatRenderer:
    """Return the renderer of a chat template with one token a byte."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    base = Tokenizer(models.BPE(vocabulary, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]}, replace_extra_special_tokens=False)
    made.chat_template = template
    return make_renderer(made)


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    """One token a byte, and a template that leaves earlier turns alone."""
    return renderer_of(CHATML)


@pytest.fixture(scope="session")
def forgetful() -> ChatRenderer:
    """One token a byte, and a template that changes earlier turns."""
    return renderer_of(FORGETS)


@pytest.fixture(scope="session")
def stubborn() -> ChatRenderer:
    """One token a byte, and a template whose first character changes with every user message."""
    return renderer_of(COUNTS)
