"""Which network gloo takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

NAME = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_on(address: str) -> Iterator[None]:
    """Have gloo's groups that are made meanwhile use the network of this machine's ``address``.

    By itself it takes what the host's name stands for, which may be no address that others can reach. A name that the
    environment has already stays.
    """
    name = interface_of(address)
    if name is None or NAME in os.environ or sys.platform != "linux":
        yield
        return
    os.environ[NAME] = name
    try:
        yield
    finally:
        del os.environ[NAME]


def interface_of(address: str) -> str | None:
    """Return the network interface that has ``address``, or None where none has."""
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if address in [one.address for one in own]), None)
