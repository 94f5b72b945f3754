"""Secrets in a configuration: tokens, passwords, headers and environment variables. They are stored in files of mode 0600."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

REDACTED = "<redacted>"
"""Stands in place of a secret in what is shown, given to trackers, or stored in files that others may read."""

_NAME = re.compile(
    r"(token|secret|password|passwd|passphrase|(api|access|private|auth)[_-]?key|credentials?|authorization|cookie)$",
    re.IGNORECASE,
)
_WHOLE = {"headers": (), "env": ("tools",), "environment": ("tools",)}
"""Names of mappings all of whose values are secret, and the sections in which they are; without one: in all."""
_TEXT = re.compile(
    r"://[^/\s@]+@"  # user and password in an address
    r"|[?&][\w-]*(token|secret|password|key|signature)="
    r"|--?[\w-]*(token|secret|password|key)[ =]"  # an option of a command
    r"|\bBearer ",
    re.IGNORECASE,
)


def secret_part(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the secrets of a configuration, nested as they are. A list with a secret is secret as a whole."""
    return _split(tree, (), keep=True)


def redact(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with `REDACTED` in place of each secret."""
    return _split(tree, (), keep=False)


def redacted_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys whose value is `REDACTED`: the file was written without its secrets."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from redacted_keys(value, f"{prefix}{name}.")
        elif value == REDACTED:
            yield f"{prefix}{name}"


def _split(tree: Mapping[str, Any], prefix: tuple[str, ...], *, keep: bool) -> dict[str, Any]:
    selected: dict[str, Any] = {}
    for name, value in tree.items():
        path = (*prefix, str(name))
        if isinstance(value, Mapping):
            inner = _split(value, path, keep=keep)
            if inner or not keep:
                selected[name] = inner
        elif _is_secret(path, value):
            selected[name] = value if keep else REDACTED
        elif not keep:
            selected[name] = value
    return selected


def _is_secret(path: tuple[str, ...], value: object) -> bool:
    if isinstance(value, list | tuple):
        words = " ".join(item for item in value if isinstance(item, str))
        return _is_secret(path, words) or any(
            _split(item, path, keep=True) for item in value if isinstance(item, Mapping)
        )
    if value is None or value == "" or isinstance(value, bool):
        return False
    return _is_secret_name(path) or (isinstance(value, str) and _TEXT.search(value) is not None)


def _is_secret_name(path: tuple[str, ...]) -> bool:
    if _NAME.search(path[-1]):
        return True
    return any(name in _WHOLE and (not _WHOLE[name] or path[0] in _WHOLE[name]) for name in path[2:-1])
