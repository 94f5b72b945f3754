"""Signatures that hide something: ``python -m tests.structure.signatures [--list] [FOLDER …]``.

Counted are functions of more than eight parameters without a reason on the line of ``def``, and parameters and return values
that are annotated with ``Any``, alone or inside another type.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.structure.names import FOLDERS, python_files
from tests.structure.nodes import FUNCTIONS, read_nodes

MOST_PARAMETERS = 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Signatures:
    """What the signatures of a tree hide."""

    functions: int = 0
    long: list[str] = field(default_factory=list)
    """``FILE:LINE: NAME (count)`` of functions with too many parameters and no reason."""
    untyped: list[str] = field(default_factory=list)
    """``FILE:LINE: NAME: ANNOTATION`` of each annotation with ``Any``."""

    def add(self, path: Path, nodes: Sequence[ast.AST]) -> None:
        """Add the signatures of a file, from all its nodes."""
        for node in nodes:
            if not isinstance(node, FUNCTIONS):
                continue
            self.functions += 1
            count = len(parameters(node))
            if count > MOST_PARAMETERS and not has_reason(node, path.read_text(encoding="utf-8").splitlines()):
                self.long.append(f"{path}:{node.lineno}: {node.name} ({count})")
            self.untyped += [f"{path}:{node.lineno}: {node.name}: {text}" for text in untyped_annotations(node)]


def parameters(function: Function) -> list[ast.arg]:
    """All parameters of a function but for ``self`` and ``cls``."""
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    named += [argument for argument in (spec.vararg, spec.kwarg) if argument is not None]
    return [argument for argument in named if argument.arg not in {"self", "cls"}]


def has_reason(function: Function, lines: Sequence[str]) -> bool:
    """Whether a line from ``def`` to the body has a comment."""
    return any("#" in line for line in lines[function.lineno - 1 : function.body[0].lineno - 1])


def untyped_annotations(function: Function) -> Iterator[str]:
    """Annotations of a signature that hold ``Any``."""
    annotations = [argument.annotation for argument in parameters(function)] + [function.returns]
    for annotation in annotations:
        if annotation is not None and "Any" in {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}:
            yield ast.unparse(annotation)


def read_signatures(paths: Sequence[Path]) -> Signatures:
    """The signatures of all functions in Python files."""
    signatures = Signatures()
    for path in paths:
        signatures.add(path, read_nodes(path))
    return signatures


def main(arguments: list[str]) -> None:
    """Print a table with a row for each folder, and with ``--list`` what it counts."""
    folders = [argument for argument in arguments if argument != "--list"] or list(FOLDERS)
    print(f"| folder | functions | over {MOST_PARAMETERS} parameters | annotations with Any |\n|---|---|---|---|")
    for folder in folders:
        signatures = read_signatures(python_files(Path(folder)))
        print(f"| {folder} | {signatures.functions} | {len(signatures.long)} | {len(signatures.untyped)} |")
        if "--list" in arguments:
            print(*signatures.long, *signatures.untyped, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
