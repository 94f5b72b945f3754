"""YAML of configurations: version 1.2 (its core schema), without anchors, and with each key once.

``010`` is the number 10; ``12:30``, ``yes``, ``no``, ``on``, ``off`` and ``2026-11-26`` are text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from copy import deepcopy
from functools import lru_cache

import yaml
from yaml.events import AliasEvent, NodeEvent
from yaml.nodes import MappingNode, Node, ScalarNode

from agentrl.core.errors import ConfigError
from agentrl.core.reading import flatten_message

_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_TAG = "tag:yaml.org,2002:"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("int", _INTEGER.pattern, tuple("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
)
"""Each type with the texts that are it, and their first characters."""


def _refusal(problem: str, source: Node | NodeEvent) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=source.start_mark)  # type: ignore[arg-type]


class _Loader(yaml.SafeLoader):
    """Reads one document."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # those of YAML 1.1
    yaml_constructors = {
        f"{_TAG}{name}": yaml.SafeLoader.yaml_constructors[f"{_TAG}{name}"] for name in ("null", "str", "seq")
    } | {None: yaml.SafeLoader.yaml_constructors[None]}

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event: NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]
        if (anchor := event.anchor) is not None:
            sign = "*" if isinstance(event, AliasEvent) else "&"
            raise _refusal(f"{sign}{anchor}: anchors and aliases are not supported; write the value out", event)
        return super().compose_node(parent, index)

    def construct_map(self, node: Node) -> dict[Hashable, object]:
        if not isinstance(node, MappingNode):
            raise _refusal("this is no mapping", node)
        lines: dict[str, int] = {}
        mapping: dict[Hashable, object] = {}
        for key_node, value_node in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise _refusal("a key is text; put it in quotes", key_node)
            if (name := str(key)) in lines:  # a number is text where names are expected
                where = "twice in one line" if lines[name] == line else f"in line {lines[name]} too"
                raise _refusal(f"the key {key!r} is {where}; leave one out", key_node)
            lines[name], mapping[key] = line, self.construct_object(value_node, deep=True)
        return mapping

    def construct_bool(self, node: ScalarNode) -> bool:
        text = str(node.value).lower()
        if text not in ("true", "false"):
            raise ValueError(f"{node.value!r} is neither true nor false")
        return text == "true"

    def construct_int(self, node: ScalarNode) -> int:
        text = str(node.value)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    def construct_float(self, node: ScalarNode) -> float:
        return float(re.sub(r"\.(inf|nan)", r"\1", str(node.value).lower()))


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes that YAML 1.1 or 1.2 takes for another type."""


for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"(?:{_pattern})$"), list(_first))
for _name in ("bool", "int", "float", "map"):
    _Loader.add_constructor(f"{_TAG}{_name}", getattr(_Loader, f"construct_{_name}"))


def parse_yaml(text: str, origin: str) -> object:
    """Return the value that a text in YAML has.

    Args:
        text: one document.
        origin: what the text is, for messages: ``configuration FILE``.

    Raises:
        ConfigError: it is no YAML 1.2, has a key twice in a mapping, or an anchor; the message has the line.
    """
    try:
        return deepcopy(_load(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{origin}{line}: {flatten_message(error.problem or error)}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: its values are nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{origin}: {flatten_message(error)}") from None


@lru_cache(maxsize=128)
def _load(text: str) -> object:
    """Return the value of a text; a configuration is read several times in a process, once for each of its layers and checks."""
    value: object = yaml.load(text, _Loader)
    return value


def dump_yaml(value: object, *, flow: bool = False, style: str | None = None, allow_unicode: bool = True) -> str:
    """Return a value as YAML that `parse_yaml` reads back; keys keep their order.

    Args:
        value: mappings, lists, texts, numbers, booleans and None.
        flow: in one line, with braces and brackets, unless a text has line breaks.
        style: ``"`` puts all scalars in double quotes.
        allow_unicode: write characters outside of ASCII as they are.
    """
    return yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=flow,
        default_style=style,
        width=float("inf") if flow else None,
        sort_keys=False,
        allow_unicode=allow_unicode,
    )
