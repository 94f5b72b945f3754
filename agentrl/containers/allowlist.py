"""Network ``allowlist``: an HTTP proxy of this process, which listens on the loopback of a machine that has no other network.

This process enters the network namespace of the machine's container to listen there, so it must be root on the daemon's machine.
Nothing inside forwards connections, and nothing inside can be changed to reach other hosts.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path

from typing_extensions import override

from agentrl.core.errors import MissingError
from agentrl.sandbox.egress import ADDRESS, EgressProxy

CLONE_NEWNET = 0x40000000
CONNECT_S = 30.0


class AllowlistProxy(EgressProxy):
    """The proxy of one machine.

    Args:
        hosts: see `MachineSpec.allowed_hosts`.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        super().__init__((), key="allowed_hosts")
        self._patterns = tuple(host.lower().rstrip(".") for host in hosts)

    @override
    def permits(self, host: str, port: int) -> bool:
        return any(_matches(pattern, host) for pattern in self._patterns)


def is_allowed(host: str, patterns: Sequence[str]) -> bool:
    """Return whether a host fits one of `MachineSpec.allowed_hosts`."""
    return AllowlistProxy(patterns).permits(host.lower().rstrip("."), 0)


def _matches(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    try:
        return ip_address(host) in ip_network(pattern)
    except ValueError:
        return host == pattern


def listen_inside(
    pid: int, container: str, address: tuple[str, int] = ADDRESS, setting: str = "network=allowlist"
) -> socket.socket:
    """Return a socket that listens on the loopback of a container's network namespace.

    Args:
        pid: the container's first process, as the daemon knows it.
        container: its id.
        address: where to listen in the container; port 0 takes a free one.
        setting: the key and value that need it, for messages.

    Raises:
        MissingError: the daemon is on another machine, or this process may not enter the namespace.
    """
    try:
        return _make_inside(pid, container, setting, lambda: _listen(address))
    except OSError as error:
        raise MissingError(
            f"{setting}: this process cannot listen in the container's network namespace: {error}"
        ) from error


def connect_inside(pid: int, container: str, address: tuple[str, int], setting: str) -> socket.socket:
    """Return a connection to an address in a container's network namespace; see `listen_inside`.

    Raises:
        MissingError: the daemon is on another machine, or this process may not enter the namespace.
        OSError: nothing answers there.
    """
    return _make_inside(pid, container, setting, lambda: socket.create_connection(address, CONNECT_S))


def _make_inside(pid: int, container: str, setting: str, make: Callable[[], socket.socket]) -> socket.socket:
    if not is_local(pid, container):
        raise MissingError(
            f"{setting} needs the Docker daemon on this machine: this process enters the container's network namespace"
        )
    outcome: list[socket.socket | OSError | MissingError] = []

    def enter() -> None:
        try:
            _enter_namespace(pid, setting)
            outcome.append(make())
        except (OSError, MissingError) as error:
            outcome.append(error)

    # The thread ends with the namespace that it has entered.
    thread = threading.Thread(target=enter, name="enter-network-namespace")
    thread.start()
    thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def is_local(pid: int, container: str) -> bool:
    """Return whether a container's first process is one of this machine: the same number may be another process here."""
    try:
        return pid > 0 and container in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


def _enter_namespace(pid: int, setting: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(namespace, CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(namespace)
    except OSError as error:
        raise MissingError(
            f"{setting} needs root on the Docker daemon's machine, to enter the container's network namespace: {error}"
        ) from error


def _listen(address: tuple[str, int]) -> socket.socket:
    # With the protocol, without which asyncio does not disable Nagle's algorithm.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener
