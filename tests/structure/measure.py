"""Measures of a package's structure as a Markdown table: ``python -m tests.structure.measure [[NAME=]FOLDER[:TESTS]]…``.

Several packages are printed next to each other. Tests are the Python files in the folder TESTS (by default ``tests``
next to the package or one folder up) and test files inside the package. ``__init__.py`` files, which re-export, are
left out of "most imports by one module". Lines of files and functions are all lines; those of tests and code are
compared without blank lines, comments and docstrings.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.structure.graph import Graph, Kind, is_test, public_methods, read_graph, strongly_connected
from tests.structure.nodes import FUNCTIONS

LONG_FUNCTION = 60
MANY_METHODS = 15
KINDS = {"at import": [Kind.RUNTIME], "all": list(Kind)}


@dataclass(frozen=True, slots=True)
class Measures:
    """One package's row of the table, and the names behind its counts."""

    cells: dict[str, str]
    """By column title."""
    details: dict[str, list[str]]


def measure(name: str, package: Path, tests: Path | None) -> Measures:
    """All measures of the package in a folder."""
    graph = read_graph(package)
    trees = {module: ast.parse(path.read_bytes()) for module, path in graph.modules.items()}
    lines = [len(path.read_bytes().splitlines()) for path in graph.modules.values()]
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    ]
    long = [length for length in functions if length > LONG_FUNCTION]
    documented = [bool(ast.get_docstring(node)) for tree in trees.values() for node in public_names(tree)]
    modules = {one: edges for one, edges in graph.edges().items() if graph.modules[one].name != "__init__.py"}
    busiest, imported = max(modules.items(), key=lambda item: len(item[1]))
    loose = [module for module, path in graph.modules.items() if is_loose(graph, module, path)]
    classes = [
        f"{module}.{one} ({len(methods)})"
        for module, tree in trees.items()
        for one, methods in public_methods(tree).items()
        if len(methods) > MANY_METHODS
    ]
    cycles = {kind: strongly_connected(graph.edges(kinds)) for kind, kinds in KINDS.items()}
    package_cycles = strongly_connected(graph.package_edges())
    packages = graph.package_edges()
    test_lines = sum(map(code_lines, find_tests(package, tests)))
    cells = {
        "package": name,
        "modules": str(len(lines)),
        "lines per file: median, max": f"{median(lines):.0f}, {max(lines)}",
        "lines per function: median, max": f"{median(functions):.0f}, {max(functions)}",
        f"functions > {LONG_FUNCTION}": f"{len(long)} ({len(long) / len(functions):.1%})",
        "public names with docstring": f"{sum(documented) / len(documented):.0%}",
        "loose modules": str(len(loose)),
        "most imports by one module": f"{len(imported)} ({busiest.removeprefix(graph.root + '.')})",
        f"classes > {MANY_METHODS} public methods": str(len(classes)),
        "modules in import cycles: at import": in_cycles(cycles["at import"]),
        "lazy and type-only too": in_cycles(cycles["all"]),
        "top-level packages": str(len(packages)),
        "arrows between them": str(sum(map(len, packages.values()))),
        "top-level packages in cycles": in_cycles(package_cycles),
        "test lines per code line": f"{test_lines / sum(map(code_lines, graph.modules.values())):.2f}",
    }
    details = {
        "loose": loose,
        f"classes > {MANY_METHODS}": classes,
        "package cycles": [*map(", ".join, package_cycles)],
    }
    details |= {f"cycles, {kind}": [*map(", ".join, members)] for kind, members in cycles.items()}
    return Measures(cells, details)


def code_lines(path: Path) -> int:
    """Lines of a file without blank lines, comments and docstrings."""
    source = path.read_text()
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in strings for number, line in lines)


def public_names(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """A file's public functions and classes, and these classes' public methods."""
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (
                    definition
                    for definition in node.body
                    if isinstance(definition, FUNCTIONS) and not definition.name.startswith("_")
                )


def is_loose(graph: Graph, module: str, path: Path) -> bool:
    """Whether a module lies at the top of the package next to ``__init__.py``."""
    inside = module.removeprefix(graph.root).removeprefix(".")
    return "." not in inside and path.name not in {"__init__.py", "__main__.py"}


def in_cycles(cycles: list[list[str]]) -> str:
    """How many nodes are in import cycles: ``0``, or ``9 (2 cycles, largest 5)``."""
    total = sum(map(len, cycles))
    return f"{total} ({len(cycles)} cycles, largest {len(cycles[0])})" if len(cycles) > 1 else str(total)


def find_tests(package: Path, tests: Path | None) -> set[Path]:
    """Python files of the package's tests, outside and inside it."""
    inside = {path.resolve() for path in package.rglob("*.py") if is_test(path.relative_to(package))}
    return inside | {path.resolve() for path in tests.rglob("*.py")} if tests else inside


def parse_argument(argument: str) -> tuple[str, Path, Path | None]:
    """Name, folder and tests of one ``[NAME=]FOLDER[:TESTS]``."""
    name, _, folders = argument.rpartition("=")
    folder, _, tests = folders.partition(":")
    package = Path(folder).resolve()
    nearby = [path for path in (package.parent / "tests", package.parent.parent / "tests") if path.is_dir()]
    return name or package.name, package, Path(tests) if tests else next(iter(nearby), None)


def main(arguments: list[str]) -> None:
    """Print the table, and below it the names behind the counts."""
    rows = [measure(*parse_argument(argument)) for argument in arguments or ["agentrl"]]
    titles = list(rows[0].cells)
    for cells in (titles, ["---"] * len(titles), *(row.cells.values() for row in rows)):
        print(f"| {' | '.join(cells)} |")
    for row in rows:
        for title, detail in row.details.items():
            if detail:
                print(f"\n{row.cells['package']}, {title}:", *detail, sep="\n- ")


if __name__ == "__main__":
    main(sys.argv[1:])
