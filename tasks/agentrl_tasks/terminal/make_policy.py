"""Write the untrained policy (tokenizer and random weights) that ``--config terminal/sft_warm`` starts from.

``python -m agentrl_tasks.terminal.make_policy runs/terminal_init``
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl_tasks.small_policy import PolicySize, run_command, save_marker_policy

from .demonstrations import FAULTS, Chats
from .kinds import COLORS, EVENTS, FUNCTIONS, KEYS, NAMES, THINGS

SIZE = PolicySize(hidden=128, layers=4, heads=4, key_value_heads=2, feed_forward=384)
"""0.86M parameters."""
WORDS = (*COLORS, *THINGS, *NAMES, *KEYS, *EVENTS, "ERROR", "WARNING", "INFO", "DEBUG", "price", "count", "weight", "score",
         "age", "data", "input", "store", "files", "health", "state", "ready", "title", "label", "owner", *FUNCTIONS)  # fmt: skip
"""Words in which exercises of a kind differ: one token each, wherever they are."""
_TURNS = ("system\nTools: bash(command)", "user\n", "assistant\n", "tool\n")
_CONVERSATIONS = 1000
_LEAST_COUNT = 4
_SEED = 9000
_VARIABLE = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(sorted(WORDS, key=len, reverse=True))})(?![A-Za-z])|\d")


def sentences(texts: Iterable[str]) -> list[str]:
    """Return the texts between `WORDS` and digits that occur often: one token each."""
    counts = Counter(text for whole in texts for text in _VARIABLE.split(whole) if len(text) > 1)
    return sorted(text for text, count in counts.items() if count >= _LEAST_COUNT)


def texts(count: int = _CONVERSATIONS) -> Iterator[str]:
    """Yield what the policy reads and writes."""
    chats = Chats(dict.fromkeys(FAULTS, 0.1), _SEED)
    for number in range(count):
        yield from map(_text, chats[number]["messages"])


def _text(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "".join(
        [
            message["content"],
            *(
                f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n</tool_call>'
                for call in calls
            ),
        ]
    )


def save_policy(folder: Path, seed: int = 0) -> None:
    """Write the policy into ``folder``, a Hugging Face model."""
    markers = (*_TURNS, *WORDS, *sentences(texts()))
    save_marker_policy(folder, markers, seed=seed, size=SIZE)


def main() -> None:
    """Run from the command line."""
    run_command(__doc__, save_policy)


if __name__ == "__main__":
    main()
