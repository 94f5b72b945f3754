"""The server that forks the data workers. It imports what they need, while the process that trains does so too."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

from agentrl.core.child_process import worker_processes

_MODULES = ("agentrl.sft.batches", "agentrl.sft.demonstrations", "agentrl.sft.chats", "agentrl.render.registry")


def sft_processes() -> ForkServerContext:
    """Return the context of `multiprocessing` for data workers, and start its server unless it runs."""
    return worker_processes(_MODULES)
