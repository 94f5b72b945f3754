"""The packages of agentrl from bottom to top, and their tree in ``docs/explanation/architecture.md`` (``make docs``)."""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "agentrl"
PAGE = REPOSITORY / "docs" / "explanation" / "architecture.md"
BEGIN, END = "<!-- packages: written by `make docs` -->", "<!-- end of packages -->"

BOTTOM_TO_TOP = """
    core config clients batch algo distributed obs models render rewards sandbox containers data audit episode learner
    inference toolserver gateway adapters weight_sync self_play cluster testing project_template runtime doctor planner evaluation
    sft train tune dashboard api launch cli
"""
LAYERS = tuple((package,) for package in BOTTOM_TO_TOP.split())
"""Rows from bottom to top: a package imports only packages of lower rows, lazy and type-only imports included."""


def package_docs(package: Path = PACKAGE) -> dict[str, str]:
    """First docstring line of each top-level package."""
    docs = {}
    for path in sorted(package.glob("*/__init__.py")):
        docs[path.parent.name] = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    return docs


def render_layers(layers: Sequence[Sequence[str]], docs: Mapping[str, str], root: str = "agentrl") -> str:
    """The packages as a plain-text tree, bottom row first, with the summary of each."""
    names = [name for row in layers for name in row]
    width = max(map(len, names)) + 2
    lines = [f"  {name + '/':<{width}} {docs.get(name, '')}".rstrip() for name in names]
    return "\n".join(["```text", f"{root}/", *lines, "```"])


def insert(page: str, text: str) -> str:
    """A page with the text between its two marker comments replaced.

    Raises:
        ValueError: the page does not have each marker exactly once, in order.
    """
    text_before, begin, page_end = page.partition(BEGIN)
    _, end, text_after = page_end.partition(END)
    if not begin or not end or BEGIN in text_after or END in text_before + text_after:
        raise ValueError(f"the page needs one line {BEGIN} and after it one line {END}")
    return f"{text_before}{begin}\n{text}\n{end}{text_after}"


def up_to_date(page: str) -> str:
    """The architecture page with today's tree of packages."""
    return insert(page, render_layers(LAYERS, package_docs()))


if __name__ == "__main__":
    PAGE.write_text(up_to_date(PAGE.read_text()))
