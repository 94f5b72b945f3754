"""The network interface of gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

NAME = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_on(address: str) -> Iterator[None]:
    """Let gloo groups that are created in this context use the network interface with ``address``.

    By default gloo uses the address of the host name, which other machines may not be able to reach. An interface that is
    already set in the environment is kept, as is the default if this machine does not have ``address``.
    """
    name = find_interface(address)
    if name is None or NAME in os.environ or sys.platform != "linux":
        yield
        return
    os.environ[NAME] = name
    try:
        yield
    finally:
        del os.environ[NAME]


def find_interface(address: str) -> str | None:
    """Return the network interface with ``address``, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in interfaces if address in [address_info.address for address_info in addresses]),
        None,
    )
