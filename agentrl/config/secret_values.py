"""Secrets in a configuration, and in texts about it: tokens, passwords, headers and environment variables.

They are stored in files of mode 0600, and shown nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

REDACTED = "<redacted>"
"""Stands in place of a secret in what is shown, given to trackers, or stored in files that others may read."""

_NAME = re.compile(
    r"(token|secrets?|passwords?|passwd|pwd|passphrase|credentials?|authorization|cookies?|signature|connection[_-]?string"
    r"|(api|access|private|auth|secret|encryption|signing|service|master|ssh|account|client|admin|session|license|subscription"
    r"|storage|openai|anthropic|azure|wandb|hf)[_-]?keys?"
    r"|(^|[_-])(pass|pw|auth|auth[_-]header|jwt|bearer|creds|dsn|sas|access[_-]key[_-]id|session[_-]?id))$",
    re.IGNORECASE,
)
_ADDRESS_NAME = re.compile(r"(urls?|endpoint|address|host|mlflow|otlp|proxy)$", re.IGNORECASE)
"""Names of values in which ``@`` ends a user and a password, also without a scheme."""
_WHOLE = {"headers": (), "env": ("tools", "rollout"), "environment": ("tools",)}
"""Names of mappings all of whose values are secret, and the sections in which they are; without one: in all."""
_IN_TEXT = re.compile(
    r"(?P<before>"
    r"://(?=[^/\s]*@)"  # user and password in an address
    r"|[?&;][\w-]*(?:token|secret|password|pwd|key|sig|signature|credential|auth)="
    r"|--?[\w-]*(?:token|secret|password|key)[ =]"  # an option of a command
    r"|\b\w*(?:token|secret|password|passwd|api_?key)="  # a variable of the environment
    r"|(?:api[_-]?key|password|passwd|secret)['\"]?:\s*"  # a header, or JSON
    r"|\b(?-i:Bearer)\s+|\b(?-i:Basic)\s+(?=[\w+/=]{12})"
    r"|(?<![\w-])(?-i:sk-(?=[\w-]{16})|(?:hf_|gh[pousr]_|AKIA|AIza)(?=[A-Za-z0-9]{16})|(?:glpat-|xox[abp]-)(?=[\w-]{16}))"
    r")(?P<secret>(?<=://)[^/\s]*(?=@)|'[^']*'|\"[^\"]*\"|[^&;\s'\",]+)",
    re.IGNORECASE,
)


def secret_part(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the secrets of a configuration, nested as they are. A list with a secret is secret as a whole."""
    return _split(tree, (), keep=True)


def redact(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with `REDACTED` in place of each secret."""
    return _split(tree, (), keep=False)


def hide_secrets(text: str) -> str:
    """Return a text for people with `REDACTED` in place of what has the form of a secret, such as a password in an address."""
    return _IN_TEXT.sub(lambda match: f"{match['before']}{REDACTED}", text)


def shown_value(path: tuple[str, ...], value: object) -> str:
    """Return the value of a key for a message, in Python's notation except ``true``, ``false`` and ``null``."""
    if path and _is_secret(path, value):
        return REDACTED
    for constant, text in ((True, "true"), (False, "false"), (None, "null")):
        if value is constant:
            return text
    return repr(value)


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
    if isinstance(value, str) and (_contains_secret(value) or ("@" in value and _ADDRESS_NAME.search(path[-1]))):
        return True
    if _is_secret_name(path[-1]):
        return True
    return any(name in _WHOLE and (not _WHOLE[name] or path[0] in _WHOLE[name]) for name in path[2:-1])


@lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    """Return whether values of a name are secrets; a configuration is searched often, and has the same names."""
    return _NAME.search(name) is not None


@lru_cache(maxsize=4096)
def _contains_secret(text: str) -> bool:
    """Return whether a part of a text is a secret; most values of a configuration are the same in all."""
    return _IN_TEXT.search(text) is not None
