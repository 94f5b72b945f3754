"""An MCP server with one tool: a registry of people. It stands for any MCP server, and knows nothing of agentrl."""

from __future__ import annotations

from random import Random
from typing import Literal

from mcp.server import MCPServer

PHRASES = {"birthplace": "was born in", "employer": "works for", "spouse": "is married to"}
server = MCPServer("registry", log_level="WARNING")


def word(rng: Random) -> str:
    """Return a word of two syllables."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeo") for _ in range(2)).capitalize()


def person(name: str) -> dict[str, str]:
    """Facts about a person. Equal names give equal facts, so that nothing has to be stored."""
    rng = Random(name)
    return {
        "birthplace": word(rng) + rng.choice(("burg", "ton", "ville", "ford")),
        "employer": word(rng) + rng.choice(("corp", "works", "tex")),
        "spouse": f"{word(rng)} {word(rng)}",
    }


@server.tool()
def ask_registry(name: str, fact: Literal["birthplace", "employer", "spouse"]) -> str:
    """Return one fact about a person."""
    return f"{name} {PHRASES[fact]} {person(name)[fact]}."


if __name__ == "__main__":
    server.run("stdio")
