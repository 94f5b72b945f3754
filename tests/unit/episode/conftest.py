import pytest
from byte_renderer import byte_renderer

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


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    """One token a byte, and a template that leaves earlier turns alone."""
    return byte_renderer(CHATML)


@pytest.fixture(scope="session")
def forgetful() -> ChatRenderer:
    """One token a byte, and a template that changes earlier turns."""
    return byte_renderer(FORGETS)


@pytest.fixture(scope="session")
def stubborn() -> ChatRenderer:
    """One token a byte, and a template whose first character changes with every user message."""
    return byte_renderer(COUNTS)
