"""Names that do not say what they name: ``python -m tests.structure.names [--list] [FOLDER …]``.

Counted are bindings (locals, parameters, loop and exception variables) that are one of 28 context words, which say where a
value stands in a sentence and not what it is, and functions that are named by a bare participle (``divided``, ``kept``) or by
``of`` (``of_source``). Figures are for 1,000 bindings, so that trees of different sizes compare.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.structure.nodes import FUNCTIONS, read_nodes

CONTEXT_WORDS = frozenset(
    [
        "found",
        "one",
        "each",
        "given",
        "some",
        "other",
        "others",
        "own",
        "rest",
        "left",
        "part",
        "place",
        "before",
        "after",
        "here",
        "there",
        "what",
        "now",
        "kept",
        "known",
        "held",
        "wanted",
        "needed",
        "missing",
        "whole",
        "said",
        "asked",
        "told",
    ]
)
PARTICIPLES = frozenset(("held", "kept", "known", "left", "made", "said", "sent", "told", "taken", "written", "begun", "drawn",
                         "found", "given", "shown"))  # fmt: skip
FOLDERS = ("agentrl", "benchmarks", "envs", "tools", "tasks", "examples")
TESTS = "tests"


@dataclass
class Names:
    """What a tree binds."""

    bindings: int = 0
    context: list[str] = field(default_factory=list)
    """``FILE:LINE: NAME`` of each binding that is a context word."""
    participles: list[str] = field(default_factory=list)
    """``FILE:LINE: NAME`` of each function that is a bare participle."""
    named_by_of: list[str] = field(default_factory=list)
    """``FILE:LINE: NAME`` of each function whose name begins or ends with ``of``."""

    def add(self, path: Path, nodes: Sequence[ast.AST]) -> None:
        """Add the names of a file, from all its nodes."""
        for name, line in bindings(nodes):
            self.bindings += 1
            if name.strip("_") in CONTEXT_WORDS:
                self.context.append(f"{path}:{line}: {name}")
        for name, line in functions(nodes):
            words = name.strip("_").split("_")
            if is_participle(name):
                self.participles.append(f"{path}:{line}: {name}")
            if "of" in (words[0], words[-1]):
                self.named_by_of.append(f"{path}:{line}: {name}")

    @property
    def context_rate(self) -> float:
        """Context words for 1,000 bindings."""
        return 1000 * len(self.context) / max(1, self.bindings)


def bindings(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Names that nodes of a module bind, with their lines; attributes and imports are none."""
    for node in nodes:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name, node.lineno


def functions(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Names of functions and methods, with their lines; properties are named as what they are."""
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            decorators = {getattr(decorator, "attr", getattr(decorator, "id", "")) for decorator in node.decorator_list}
            if not decorators & {"property", "cached_property", "setter", "fixture", "override"}:
                yield node.name, node.lineno


def is_participle(name: str) -> bool:
    """Whether a function's name is one past participle."""
    word = name.strip("_")
    return word in PARTICIPLES or (
        "_" not in word and len(word) > 4 and word.endswith("ed") and not word.endswith("eed")
    )


def read_names(paths: Sequence[Path]) -> Names:
    """The names of all Python files."""
    names = Names()
    for path in paths:
        names.add(path, read_nodes(path))
    return names


def python_files(folder: Path) -> list[Path]:
    """Python files below a folder, hidden folders apart."""
    files = folder.rglob("*.py")
    return sorted(file for file in files if not any(name.startswith(".") for name in file.relative_to(folder).parts))


def main(arguments: list[str]) -> None:
    """Print a table with a row for each folder, and with ``--list`` what it counts."""
    folders = [argument for argument in arguments if argument != "--list"] or [*FOLDERS, TESTS]
    print("| folder | bindings | context words | for 1,000 | participles | named by of |\n|---|---|---|---|---|---|")
    for folder in folders:
        names = read_names(python_files(Path(folder)))
        counts = (len(names.context), f"{names.context_rate:.1f}", len(names.participles), len(names.named_by_of))
        print(f"| {folder} | {names.bindings} | {' | '.join(map(str, counts))} |")
        if "--list" in arguments:
            print(*names.context, *names.participles, *names.named_by_of, sep="\n")
            print(Counter(line.rpartition(" ")[2] for line in names.context).most_common())


if __name__ == "__main__":
    main(sys.argv[1:])
