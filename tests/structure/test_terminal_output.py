"""Text reaches a terminal in one way: by the consoles of `agentrl.obs.console`, which read no markup."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure.layers import PACKAGE, REPOSITORY
from tests.structure.nodes import list_nodes

PLACES = [PACKAGE, *(REPOSITORY / name for name in ("envs", "tools", "tasks"))]
CONSOLE = PACKAGE / "obs" / "console.py"
ELSEWHERE = {
    PACKAGE / "sandbox" / "runner",  # runs in a sandbox
    PACKAGE / "gateway" / "harnesses" / "installed.py",  # runs in a sandbox, too
    PACKAGE / "project_template" / "template",  # a project of the user
    REPOSITORY / "tasks",  # scripts that make the packaged policies print the path of what they have written
}
ONLY_IN_THE_CONSOLE = {
    "rich.console.Console", "rich.panel.Panel", "rich.markup.escape", "rich.markup.render", "rich.print", "rich.tree.Tree",
    "rich.logging.RichHandler", "rich.text.Text.from_markup", "logging.basicConfig", "logging.StreamHandler", "print",
}  # fmt: skip
"""They read markup, print by themselves, or make another console."""
PRINTING = re.compile(r"\bprint\b|\brich\b|basicConfig|StreamHandler|\bmarkup\b|status\(|std(out|err)\.write")
"""A module without any of these calls none of them, and is not parsed."""


def files() -> Iterator[Path]:
    for folder_name in PLACES:
        for path in sorted(folder_name.rglob("*.py")):
            if path != CONSOLE and not any(path.is_relative_to(allowed) for allowed in ELSEWHERE):
                yield path


def faults(source: str) -> list[str]:
    """Return the calls in a module that print in another way, or with markup."""
    if not PRINTING.search(source):
        return []
    nodes, faults = list_nodes(ast.parse(source)), []
    origins = {"print": "print"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            origins |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            origins |= {alias.asname or alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        root, _, attribute = _dotted_name(node.func).partition(".")
        name = f"{origins.get(root, '')}.{attribute}".strip(".") if root in origins else ""
        options = {option.arg: option.value for option in node.keywords}
        markup = options.get("markup")
        if name in ONLY_IN_THE_CONSOLE:
            faults.append(name)
        elif markup is not None and ast.unparse(markup) != "False":
            faults.append(f"{ast.unparse(node.func)}(markup={ast.unparse(markup)})")
        elif name == "rich.progress.TextColumn" and markup is None:
            faults.append("TextColumn reads markup unless markup=False")
        elif attribute.endswith("status") and not all(isinstance(argument, ast.Constant) for argument in node.args):
            faults.append("a status reads markup unless it is a constant")
        elif root in ("sys",) and attribute in ("stdout.write", "stderr.write") and not _is_program_text(node):
            faults.append(name)
    return faults


def _dotted_name(node: ast.expr) -> str:
    """Return ``a.b.c`` as ``ast.unparse`` does, in a tenth of its time; what else is called, by that."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    return ast.unparse(node)


def _is_program_text(node: ast.Call) -> bool:
    return all(isinstance(argument, ast.Constant) for argument in node.args)


def test_text_is_printed_by_the_console_only() -> None:
    faults_by_file = {str(path.relative_to(REPOSITORY)): faults(path.read_text(encoding="utf-8")) for path in files()}
    assert len(faults_by_file) > 300
    wrote = {path: names for path, names in faults_by_file.items() if names}
    # The configuration as YAML, whose writer escapes controls, and a template of agentrl's, or the user's own, for a file.
    verbatim = ["agentrl/cli/launch.py", "agentrl/cli/sft.py", "agentrl/cli/train.py"]
    assert wrote == {path: ["sys.stdout.write"] for path in verbatim}


@pytest.mark.parametrize(
    "source",
    [
        "print(x)",
        "from rich.console import Console\nConsole()",
        "import rich\nrich.print(x)",
        "from rich.markup import escape\nescape(x)",
        "from rich.text import Text\nText.from_markup(x)",
        "console.print(x, markup=True)",
        "from rich.progress import TextColumn\nTextColumn(x)",
        "console.status(f'{x}')",
        "import sys\nsys.stderr.write(x)",
        "import logging\nlogging.basicConfig()",
    ],
)
def test_other_ways_are_found(source: str) -> None:
    assert faults(source)
