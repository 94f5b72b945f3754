"""The server that forks the data workers. It imports what they need, while the process that trains does so too."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_MODULES = ("agentrl.sft.batches", "agentrl.sft.demonstrations", "agentrl.sft.chats", "agentrl.render.registry")


def worker_processes() -> ForkServerContext:
    """Return the context of `multiprocessing` for data workers, and start its server unless it runs.

    The process that trains has threads: if it were forked, a worker could hang in a lock that a thread held.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_MODULES))
    forkserver.ensure_running()
    return context
