"""Limits of the structure: imports point down, no cycles, no loose modules, and what each package may import.

The packages and their order are ``tests.structure.layers.LAYERS``; imports inside functions and under
``if TYPE_CHECKING`` count like all others.
"""

import ast
import re
from collections import Counter

import pytest

from tests.structure.graph import Graph, Kind, public_methods, read_graph, strongly_connected, violations
from tests.structure.layers import LAYERS, PACKAGE, REPOSITORY
from tests.structure.measure import MANY_METHODS, is_loose

HEAVY = {"torch", "ray", "transformers", "sglang", "megatron"}
LIGHT_PACKAGES = {"core", "config", "clients"}
PLUGINS = {f"{folder}/agentrl_{folder}": f"agentrl_{folder}" for folder in ("envs", "tools", "tasks")}
CONTRACTS = {
    "config",  # Section, the base class of a hosted tool's options
    "containers",
    "core",
    "data",
    "rewards",
    "sandbox",
    "testing",
    "toolserver",
}
"""Packages that environments, tools and tasksets may import, besides the names in ``agentrl`` itself."""
PUBLIC_METHOD = re.compile(rb"^( +)(?:async )?def [^_]", re.MULTILINE)
"""Finds the indentation of a public method: those of a class have the same. Files with few of them are not parsed."""


@pytest.fixture(scope="module")
def graph() -> Graph:
    return read_graph(PACKAGE)


def test_imports_point_down(graph: Graph) -> None:
    assert violations(graph, LAYERS) == []


def test_no_import_cycles(graph: Graph) -> None:
    assert strongly_connected(graph.edges()) == []


def test_every_module_is_in_a_package(graph: Graph) -> None:
    assert [module for module, path in graph.modules.items() if is_loose(graph, module, path)] == []


def test_no_class_has_too_many_public_methods(graph: Graph) -> None:
    sources = {module: path.read_bytes() for module, path in graph.modules.items()}
    classes = {
        f"{module}.{name}": len(methods)
        for module, source in sources.items()
        if max(Counter(PUBLIC_METHOD.findall(source)).values(), default=0) > MANY_METHODS
        for name, methods in public_methods(ast.parse(source)).items()
    }
    assert {name: count for name, count in classes.items() if count > MANY_METHODS} == {}


def test_only_the_cluster_imports_ray(graph: Graph) -> None:
    users = {
        graph.top_level(imported.importer) for imported in graph.external() if imported.imported.split(".")[0] == "ray"
    }
    assert users == {"cluster"}


def test_light_packages_import_nothing_heavy(graph: Graph) -> None:
    heavy = [
        (imported.importer, imported.imported)
        for imported in graph.external([Kind.RUNTIME, Kind.LAZY])
        if graph.top_level(imported.importer) in LIGHT_PACKAGES and imported.imported.split(".")[0] in HEAVY
    ]
    assert heavy == []


def test_agentrl_imports_no_plugins(graph: Graph) -> None:
    plugins = set(PLUGINS.values())
    assert [imported for imported in graph.external() if imported.imported.split(".")[0] in plugins] == []


@pytest.mark.parametrize("folder", PLUGINS)
def test_plugins_import_only_the_contracts(folder: str) -> None:
    plugins = read_graph(REPOSITORY / folder)
    assert plugins.modules
    actual = [
        (imported.importer, imported.imported)
        for imported in plugins.external()
        if imported.imported.startswith("agentrl.") and imported.imported.split(".")[1] not in CONTRACTS
    ]
    assert actual == []


@pytest.mark.parametrize("folder", PLUGINS)
def test_plugins_have_no_import_cycles(folder: str) -> None:
    assert strongly_connected(read_graph(REPOSITORY / folder).edges()) == []
