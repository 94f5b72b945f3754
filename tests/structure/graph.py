"""Import graph of a Python package, read from its source without importing it."""

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.structure.nodes import FUNCTIONS, list_nodes

Edges = Mapping[str, Collection[str]]
"""From each node to the nodes that it imports."""

SKIPPED_FOLDERS = frozenset({"template", "templates", "__pycache__"})
"""Folders inside a package whose Python files are another project's, not modules of this one."""


class Kind(StrEnum):
    """When an import statement runs."""

    RUNTIME = "runtime"
    """While the module is imported."""
    LAZY = "lazy"
    """When a function is called."""
    TYPING = "typing"
    """Never: it is under ``if TYPE_CHECKING``."""


ALL_KINDS = frozenset(Kind)
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
"""Fields of nodes that hold statements, or what holds statements."""


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name in a source file."""

    importer: str
    """Dotted name of the importing module: ``agentrl.train.run``."""
    imported: str
    """Dotted name of the imported module; of an external package as it is written."""
    kind: Kind
    line: int


@dataclass(frozen=True, slots=True)
class Graph:
    """All modules of a package and all imports in them."""

    root: str
    """Dotted name of the package."""
    modules: Mapping[str, Path]
    imports: Sequence[Import]

    def edges(self, kinds: Collection[Kind] = ALL_KINDS) -> dict[str, set[str]]:
        """From each module to the other modules of this package that it imports."""
        edges: dict[str, set[str]] = {module: set() for module in self.modules}
        for edge in self.internal(kinds):
            edges[edge.importer].add(edge.imported)
        return edges

    def package_edges(self, kinds: Collection[Kind] = ALL_KINDS) -> dict[str, set[str]]:
        """From each top-level package (or loose module) to the others that it imports, without the root's exports."""
        edges: dict[str, set[str]] = {name: set() for module in self.modules if (name := self.top_level(module))}
        for edge in self.internal(kinds):
            importer, imported = self.top_level(edge.importer), self.top_level(edge.imported)
            if importer and imported and importer != imported:
                edges[importer].add(imported)
        return edges

    def internal(self, kinds: Collection[Kind] = ALL_KINDS) -> Iterator[Import]:
        """Imports of other modules of this package."""
        for imported in self.imports:
            if imported.kind in kinds and imported.imported in self.modules and imported.imported != imported.importer:
                yield imported

    def external(self, kinds: Collection[Kind] = ALL_KINDS) -> Iterator[Import]:
        """Imports of other packages, the standard library's included."""
        return (
            imported for imported in self.imports if imported.kind in kinds and imported.imported not in self.modules
        )

    def top_level(self, module: str) -> str:
        """Top-level package or loose module that a module belongs to; empty for the root's ``__init__``."""
        return module.removeprefix(self.root).removeprefix(".").partition(".")[0]


def is_test(path: Path) -> bool:
    """Whether a file belongs to a test suite that lies inside the package."""
    name = path.name
    return "tests" in path.parts[:-1] or name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"


def dotted_name(package: Path) -> str:
    """Import name of the package in a folder: the folder's, after those of the packages around it."""
    names = [package.name]
    for parent in package.parents:
        if not (parent / "__init__.py").exists():
            break
        names.insert(0, parent.name)
    return ".".join(names)


def find_modules(package: Path) -> dict[str, Path]:
    """Dotted names and files of a package's modules, without tests and templates."""
    root, modules = dotted_name(package), {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if not is_test(inside) and SKIPPED_FOLDERS.isdisjoint(inside.parts):
            parts = inside.parent.parts if path.name == "__init__.py" else inside.with_suffix("").parts
            modules[".".join([root, *parts])] = path
    return modules


def read_graph(package: Path) -> Graph:
    """The import graph of the package in a folder."""
    package = package.resolve()
    modules, imports = find_modules(package), dict[Import, None]()
    for module, path in modules.items():
        for statement, kind in _import_statements(ast.parse(path.read_bytes()).body, Kind.RUNTIME):
            for target in _targets(statement, module, path.name == "__init__.py", modules):
                imports[Import(module, target, kind, statement.lineno)] = None
    return Graph(dotted_name(package), modules, list(imports))


def _import_statements(nodes: Iterable[ast.AST], kind: Kind) -> Iterator[tuple[ast.Import | ast.ImportFrom, Kind]]:
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, kind
        elif isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            yield from _import_statements(node.body, Kind.TYPING)
            yield from _import_statements(node.orelse, kind)
        else:  # no import is in an expression
            lazy = isinstance(node, FUNCTIONS) and kind is Kind.RUNTIME
            for field in _BLOCKS:
                yield from _import_statements(getattr(node, field, ()), Kind.LAZY if lazy else kind)


def _targets(
    statement: ast.Import | ast.ImportFrom, module: str, is_package: bool, modules: Mapping[str, Path]
) -> Iterator[str]:
    """Modules that a statement imports: ``from a import b`` is ``a.b`` if that is a module, else ``a``."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
        return
    base = statement.module or ""
    if statement.level:
        parents = module.split(".")[: None if is_package else -1]
        above = parents[: len(parents) - statement.level + 1]
        base = ".".join([*above, base] if base else above)
    for alias in statement.names:
        yield name if (name := f"{base}.{alias.name}") in modules else base


def strongly_connected(edges: Edges) -> list[list[str]]:
    """Import cycles: the strongly connected components of more than one node, largest first (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for successor in sorted(edges.get(node, ())):
            if successor not in order:
                visit(successor)
                lowest[node] = min(lowest[node], lowest[successor])
            elif successor in stack:
                lowest[node] = min(lowest[node], order[successor])
        if lowest[node] == order[node]:
            start = stack.index(node)
            component = sorted(stack[start:])
            del stack[start:]
            if len(component) > 1:
                components.append(component)

    for node in edges:
        if node not in order:
            visit(node)
    return sorted(components, key=lambda component: (-len(component), component))


def public_methods(tree: ast.Module) -> dict[str, list[str]]:
    """Public methods and properties that each class of a file defines; an overload or setter counts once."""
    return {
        node.name: sorted(
            {one.name for one in node.body if isinstance(one, FUNCTIONS) and not one.name.startswith("_")}
        )
        for node in list_nodes(tree)
        if isinstance(node, ast.ClassDef)
    }


def violations(graph: Graph, layers: Sequence[Sequence[str]], kinds: Collection[Kind] = ALL_KINDS) -> list[str]:
    """One line for each import that does not point to a lower row, and for each package that has no row.

    ``layers`` are rows from bottom to top; packages of one row do not import each other. The root's ``__init__`` is
    directly below the top row: only packages of the top row import it, and it imports none of them. ``__main__`` is above all.
    """
    rows: dict[str, float] = {package: index for index, row in enumerate(layers) for package in row}
    present = {name for module in graph.modules if (name := graph.top_level(module))} - {"__main__"}
    faults = [f"{name} is in no layer" for name in sorted(present - rows.keys())]
    faults += [f"{name} is in the layers, and there is no such package" for name in sorted(rows.keys() - present)]
    rows[""], rows["__main__"] = len(layers) - 1.5, len(layers)
    for one in graph.internal(kinds):
        importer, imported = graph.top_level(one.importer), graph.top_level(one.imported)
        if importer != imported and importer in rows and imported in rows and rows[imported] >= rows[importer]:
            where = f"{graph.modules[one.importer]}:{one.line} ({one.kind})"
            faults.append(f"{where}: {importer or graph.root} imports {one.imported}, which is not below it")
    return faults
