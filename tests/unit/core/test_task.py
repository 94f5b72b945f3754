"""What a task is made of."""

from typing import Any

import pytest

from agentrl import Message, Task

HI = Message("user", "hi")


def test_a_list_of_messages_is_a_prompt() -> None:
    assert Task("t", [HI]).prompt == (HI,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "prompt", "words"),
    [
        ("t", "hi", "Task 't' takes a tuple of Messages with texts, not 'hi'"),
        ("t", ({"role": "user", "content": "hi"},), "Task 't' takes a tuple of Messages with texts, not"),
        ("t", (Message("user", None),), "Task 't' takes a tuple of Messages with texts, not"),  # type: ignore[arg-type]
        (5, (HI,), "Task takes a str as its id, not 5"),
    ],
)
def test_another_id_or_prompt_is_refused(name: Any, prompt: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Task(name, prompt)
