from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|tool|>"]

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen2.5 has it: a newline after every end token."""

DROPS_THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3 has it: reasoning before the last user message is left out."""

NEXT_ROLE_ENDS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""As GLM has it: nothing ends a turn but the next role's marker."""

NUMBERED = (
    "{% for m in messages %}<|im_start|>{{ loop.revindex }} {{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Counts from the end, so every new message changes all before."""

ALTERNATES = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Refuses tool messages and trims contents."""

TEMPLATES = {
    "chatml": CHATML,
    "drops_thinking": DROPS_THINKING,
    "next_role_ends": NEXT_ROLE_ENDS,
    "numbered": NUMBERED,
    "alternates": ALTERNATES,
}

MakeTokenizer = Callable[[str], PreTrainedTokenizerFast]


@pytest.fixture(scope="session")
def tokenizer() -> MakeTokenizer:
    """Byte-level BPE with few merges, a non-special tag, and the chat template of that name."""

    def make(template: str) -> PreTrainedTokenizerFast:
        base = Tokenizer(models.BPE())
        base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        base.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        base.train_from_iterator(["what is the capital of France? Paris is the capital of France."] * 3, trainer)
        base.add_tokens([AddedToken("<search>", special=False, normalized=False)])
        made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|im_end|>", pad_token="<|pad|>")
        made.chat_template = TEMPLATES[template]
        return made

    return make
