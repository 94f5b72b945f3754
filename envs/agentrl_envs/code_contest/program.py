"""Extraction of a program from a policy's turn."""

from __future__ import annotations

_FENCE = "```"
_PYTHON = ("python", "python3", "py")
_THINK_END = "</think>"


def program_in(content: str) -> str | None:
    r"""Return the last complete fenced block of Python, or None.

    Reasoning, up to ``</think>``, is ignored. Example: ``"So:\n```python\nprint(1)\n```"``.
    """
    program: str | None = None
    block: list[str] | None = None
    for line in content.rpartition(_THINK_END)[2].split("\n"):
        mark = line.strip()
        if block is None:
            if mark.startswith(_FENCE) and mark.removeprefix(_FENCE).strip().lower() in _PYTHON:
                block = []
        elif mark == _FENCE:
            program, block = "\n".join(block) + "\n", None
        else:
            block.append(line)
    return program if program is not None and program.strip() else None


def can_be_sent(program: str) -> bool:
    """Return whether a text can be encoded as UTF-8: lone surrogates, which JSON allows, cannot."""
    try:
        program.encode()
    except UnicodeEncodeError:
        return False
    return True
