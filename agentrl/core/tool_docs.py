"""What a docstring states about a tool and, in the styles of Google, NumPy and Sphinx, of its parameters."""

from __future__ import annotations

import re
from textwrap import dedent

_GOOGLE = re.compile(r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+\S.*\n|[ \t]*\n)+)", re.MULTILINE)
_GOOGLE_ITEM = re.compile(r"^\*{0,2}(\w+)[ \t]*(?:\([^\n]*?\))?[ \t]*:[ \t]*(.*(?:\n(?:[ \t]+.*)?)*)", re.MULTILINE)
_NUMPY = re.compile(r"^Parameters[ \t]*\n-{3,}[ \t]*\n((?:(?!\S.*\n-{3,}).*\n)+)", re.MULTILINE)
_NUMPY_ITEM = re.compile(r"^\*{0,2}(\w+)[ \t]*(?::[^\n]*)?\n((?:[ \t]+.*\n|[ \t]*\n)+)", re.MULTILINE)
_SPHINX_ITEM = re.compile(r"^:param\b[^:\n]*?(\w+)[ \t]*:[ \t]*(.*(?:\n[ \t]+\S.*)*)", re.MULTILINE)
_SECTION = re.compile(r"\n[ \t]*\n|^(?:[A-Z]\w+:[ \t]*\n[ \t]+\S|[A-Z]\w+[ \t]*\n-{3,}|:\w+[^:\n]*:)", re.MULTILINE)


def tool_description(docstring: str) -> str:
    """Return the first paragraph of a docstring."""
    section = _SECTION.search(docstring)
    return docstring[: section.start() if section else None].strip()


def parameter_descriptions(docstring: str) -> dict[str, str]:
    """Return the descriptions of parameters in a docstring, by name, each on one line."""
    text = f"{docstring}\n"
    items = [_SPHINX_ITEM.findall(text)]
    for section, item in ((_GOOGLE, _GOOGLE_ITEM), (_NUMPY, _NUMPY_ITEM)):
        items += [item.findall(f"{dedent(match[1])}\n") for match in section.finditer(text)]
    descriptions = {name: " ".join(words.split()) for section_items in items for name, words in section_items}
    return {name: words for name, words in descriptions.items() if words}
