"""The server that forks the data workers. It imports what they need, while the process that trains does so too."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

_MODULES = ("agentrl.sft.batches", "agentrl.sft.demonstrations", "agentrl.sft.chats", "agentrl.render.registry")


def worker_processes() -> ForkServerContext:
    """Return the context of `multiprocessing` for data workers, and start its server unless it runs.

    The process that trains has threads: if it were forked, a worker could hang in a lock that a thread held.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_MODULES))
    # Ctrl-C in a terminal reaches the server, too, which would end in a traceback while it imports.
    resource_tracker.ensure_running()  # the server starts it otherwise, and that unblocks the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context
