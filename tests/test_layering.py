"""The dependency direction of docs/design.md, held by walking every import."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "agentrl"

BOTTOM = {"types", "errors", "protocols", "obs", "process"}
"""Everybody may import these."""

LEVELS = [
    {"config"},
    {"spaces", "task", "tool", "env", "registry", "resolve", "data", "rewards"},
    {"render", "models", "broadcast"},
    {"episode", "batch", "algo"},
    {"learner", "weights", "sampler", "toolserver"},
    {"cluster"},
    {
        "init",
        "interrupt",
        "audit",
        "evaluation",
        "tasksource",
        "collect",
        "session",
        "preflight",
        "placing",
        "runfolder",
        "stack",
        "train",
        "eval",
        "sft",
        "bench",
        "bench_sandbox",
        "bench_efficiency",
        "bench_weights",
        "bench_copy",
        "source",
        "turns",
        "warmstart",
        "replay",
        "rollout",
    },
    {"cli"},
]
"""From the bottom to the top: a part imports only parts below it. Parts of one level meet through protocols."""

SAME_LEVEL_ALLOWED = LEVELS[0] | LEVELS[1] | LEVELS[6]
HEAVY = {"torch", "ray", "transformers", "sglang", "megatron"}
LIGHT_PARTS = {"types", "errors", "protocols", "config", "env", "tool", "task", "spaces", "registry", "process"}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def level_of(part: str) -> int:
    return next((index for index, level in enumerate(LEVELS) if part in level), -1)


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


TEMPLATE = PACKAGE / "init" / "template"
"""Files of a new project: an author's, not agentrl's own."""

FILES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if part_of(path) not in {"__init__", "testing"} and TEMPLATE not in path.parents
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in BOTTOM or level_of(part) >= 0, f"{part} has no place in the layering"
    for module, typing_only in imports(path):
        assert not module.startswith(("agentrl_envs", "agentrl_tools", "agentrl_tasks")), f"{path} imports {module}"
        if not module.startswith("agentrl.") or typing_only:
            continue
        other = module.split(".")[1]
        if other == part or other in BOTTOM:
            continue
        if part in BOTTOM:
            raise AssertionError(f"{part} lies at the bottom and imports {module}")
        if part == "cli" and other == "testing":
            continue
        below = level_of(other) < level_of(part)
        beside = level_of(other) == level_of(part) and part in SAME_LEVEL_ALLOWED
        assert level_of(other) >= 0, f"{path} imports {module}, which has no place in the layering"
        assert below or beside, f"{path} imports {module}"


def test_only_the_cluster_imports_ray() -> None:
    users = {part_of(path) for path in FILES for module, _ in imports(path) if module.split(".")[0] == "ray"}
    assert users == {"cluster"}


def test_light_parts_import_nothing_heavy() -> None:
    for path in FILES:
        if part_of(path) in LIGHT_PARTS:
            heavy = {
                module for module, typing_only in imports(path) if module.split(".")[0] in HEAVY and not typing_only
            }
            assert not heavy, f"{path} imports {heavy}"


def test_plugins_import_only_the_contracts() -> None:
    allowed = {
        "config",  # Section, the base of a hosted tool's options
        "env",
        "errors",
        "process",
        "data",
        "registry",
        "resolve",
        "rewards",
        "spaces",
        "task",
        "testing",
        "tool",
        "toolserver",
        "types",
        "protocols",
    }
    for folder in ("envs", "tools", "tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            for module, _ in imports(path):
                if module.startswith("agentrl."):
                    assert module.split(".")[1] in allowed, f"{path} imports {module}"
