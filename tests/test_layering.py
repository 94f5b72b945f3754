"""The dependency direction of docs/design.md, held by walking every import."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "agentrl"

LAYERS = [
    "core",
    "config",
    "batch",
    "distributed",
    "obs",
    "models",
    "render",
    "rewards",
    "algo",
    "data",
    "audit",
    "episode",
    "sandbox",
    "learner",
    "inference",
    "toolserver",
    "weight_sync",
    "cluster",
    "testing",
    "project_template",
    "runtime",
    "evaluation",
    "sft",
    "bench",
    "train",
    "cli",
]
"""From the bottom to the top: a package imports only packages before it, in type-only and lazy imports too."""

HEAVY = {"torch", "ray", "transformers", "sglang", "megatron"}
LIGHT_PACKAGES = {"core", "config"}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """All imported modules, and whether the import stands under ``if TYPE_CHECKING``."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.module, id(node) in typing_only))
    return found


TEMPLATE = PACKAGE / "project_template" / "template"
"""Files of a new project: an author's, not agentrl's own."""

FILES = sorted(path for path in PACKAGE.rglob("*.py") if part_of(path) != "__init__" and TEMPLATE not in path.parents)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    for module, _ in imports(path):
        assert not module.startswith(("agentrl_envs", "agentrl_tools", "agentrl_tasks")), f"{path} imports {module}"
        if module.startswith("agentrl."):
            other = module.split(".")[1]
            assert LAYERS.index(other) <= LAYERS.index(part), f"{path} imports {module}"


def test_only_the_cluster_imports_ray() -> None:
    users = {part_of(path) for path in FILES for module, _ in imports(path) if module.split(".")[0] == "ray"}
    assert users == {"cluster"}


def test_light_parts_import_nothing_heavy() -> None:
    for path in FILES:
        if part_of(path) in LIGHT_PACKAGES:
            heavy = {
                module for module, typing_only in imports(path) if module.split(".")[0] in HEAVY and not typing_only
            }
            assert not heavy, f"{path} imports {heavy}"


def test_plugins_import_only_the_contracts() -> None:
    allowed = {
        "config",  # Section, the base of a hosted tool's options
        "core",
        "data",
        "rewards",
        "sandbox",
        "testing",
        "toolserver",
    }
    for folder in ("envs", "tools", "tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            for module, _ in imports(path):
                if module.startswith("agentrl."):
                    assert module.split(".")[1] in allowed, f"{path} imports {module}"
