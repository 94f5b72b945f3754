"""The tool: a coroutine whose type hints and docstring say how to call it."""

from __future__ import annotations

from agentrl import tool

from my_package.tasks import DIRECTORIES


@tool(timeout_s=5)
async def look_up(name: str) -> str:
    """Return what the directory says about a person."""
    for directory in DIRECTORIES.values():
        if name in directory:
            facts = directory[name]
            return (
                f"{name} was born in {facts['birthplace']}, works for {facts['employer']}, "
                f"is married to {facts['spouse']}."
            )
    # An exception becomes a result with status ``error``, and its text is what the environment may show.
    raise LookupError(f"nobody named {name!r} is in the directory")
