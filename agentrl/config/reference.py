"""The reference of all configuration keys as Markdown, made from the schema; ``docs/configuration.md`` is its output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from agentrl.config.schema import Config
from agentrl.config.validation import subsections


def reference() -> str:
    """Return the page: one table a section, one row a key with its type, default and sentence."""
    lines = [
        "# Configuration",
        "",
        "Every key, as `key=value` on the command line or nested in a YAML file. Made by `python -m agentrl.config.reference`.",
    ]
    for title, model in _walk("", Config):
        rows = [(name, info) for name, info in model.model_fields.items() if not list(subsections(info.annotation))]
        if rows:
            lines += [
                "",
                f"## `{title}`",
                "",
                (model.__doc__ or "").strip().split("\n")[0],
                "",
                "| key | type | default | |",
            ]
            lines += ["|---|---|---|---|"]
            lines += [_row(f"{title}.{name}", info) for name, info in rows]
    return "\n".join(lines) + "\n"


def _walk(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in model.model_fields.items():
        for section in subsections(info.annotation):
            many = "" if info.annotation is section else (".NAME" if "dict" in str(info.annotation) else "")
            title = f"{prefix}{name}{many}"
            yield title, section
            yield from _walk(title + ".", section)


def _row(key: str, info: Any) -> str:
    kind = str(info.annotation).replace("typing.", "").replace("<class '", "").replace("'>", "").replace("pathlib.", "")
    default = info.get_default(call_default_factory=True)
    text = " ".join((info.description or "").split())
    return f"| `{key}` | `{kind}` | `{default}` | {text} |".replace(" | None", " or None")


if __name__ == "__main__":
    sys.stdout.write(reference())
