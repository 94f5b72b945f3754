"""What pyproject.toml says of packages is what lies on disk."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import find_packages

ROOT = Path(__file__).parent.parent
SETUP_FILE = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUP = SETUP_FILE["tool"]["setuptools"]
PLUGINS = {f"agentrl_{folder}": ROOT / folder / f"agentrl_{folder}" for folder in ("envs", "tools", "tasks", "configs")}


def found_packages() -> dict[str, Path]:
    """Packages that setuptools finds, by name, with their folders."""
    options = SETUP["packages"]["find"]
    assert options["namespaces"] is False
    return {
        package: ROOT.joinpath(where, *package.split("."))
        for where in options["where"]
        for package in find_packages(str(ROOT / where), include=options["include"])
    }


def test_every_package_is_found_under_the_name_of_its_folder() -> None:
    folders = {init.parent for top in (ROOT / "agentrl", *PLUGINS.values()) for init in top.rglob("__init__.py")}
    # The template's package is data, and so is what the interpreter of SGLang on a CPU imports.
    expected = {folder for folder in folders if not {"template", "path"} & {*folder.parts}}
    assert {*found_packages().values()} == expected


def test_every_data_file_is_package_data() -> None:
    """Data lies in folders that setuptools takes for packages, unless ``package-data`` alone says what belongs to it."""
    assert SETUP["include-package-data"] is False
    packages = found_packages()
    for package, patterns in SETUP["package-data"].items():
        top = PLUGINS.get(package, ROOT / package)
        listed = {file for pattern in patterns for file in top.glob(pattern) if file.is_file()}
        modules = {file for name in packages if name.split(".")[0] == package for file in packages[name].glob("*.py")}
        files = {file for file in top.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
        assert files <= listed | modules, sorted(files - listed - modules)[:5]


def test_every_file_of_a_new_project_is_package_data() -> None:
    from agentrl.project_template import template_files

    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["agentrl"]
    files = [Path("project_template/template") / file for file in template_files()]
    assert len(files) > 5
    for file in files:  # a pattern's * matches no hidden file
        hidden = file.name.startswith(".")
        assert str(file) in patterns or (not hidden and any(file.match(pattern) for pattern in patterns)), file


def test_python_and_torch_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "torch>=2.11" in project["optional-dependencies"]["train"]
    assert {"sglang", "megatron", "dev"} <= set(project["optional-dependencies"])


def test_the_distribution_has_one_name() -> None:
    """Another project has the name ``agentrl`` at PyPI."""
    from agentrl.core.extras import DISTRIBUTION

    assert SETUP_FILE["project"]["name"] == DISTRIBUTION == "agentrl-framework"
    assert SETUP_FILE["project"]["scripts"] == {"agentrl": "agentrl.cli.main:main"}
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    for page in pages:
        assert not re.search(r"pip install [^`\n]*\bagentrl(?![-/.\w])", page.read_text()), page


PUBLIC = (
    "IMAGE_MARK", "Action", "AecAdapter", "Agent", "AsyncEnv", "CallStatus", "Callback", "CallbackError", "Chat", "Checkpoint",
    "ConfigError", "DataSource", "Env", "Evaluation", "Image", "Info", "MadeTasks", "Message", "MissingError",
    "MultiAgentEnv", "MultiReset", "MultiStep",
    "Observation", "OptimizerBatch", "Player", "PolicyEvaluation", "RandomPlayer", "Rewrite",
    "Rollout", "Run", "RunHandle", "RunStopped", "Sample", "SampleRow", "Step", "StopReason", "Task", "TaskError", "TaskSet",
    "Tool", "ToolCall", "ToolCalls", "ToolFailure", "ToolResult", "ToolResults", "ToolService", "ToolStatus", "TrainingSample",
    "TurnGame", "UserError", "View",
    "evaluate", "load_image", "make_env", "message_with_images", "register_env", "register_tool", "rollout", "served_tools",
    "tool", "train", "unknown_name", "uses_tools",
)  # fmt: skip


def test_public_names() -> None:
    import agentrl

    assert tuple(agentrl.__all__) == PUBLIC
    assert all(hasattr(agentrl, name) for name in PUBLIC)


def test_examples_and_the_template_need_public_names_only() -> None:
    allowed = ("agentrl", "agentrl.testing", "agentrl.rewards", "agentrl.algo.base", "agentrl.toolserver.mcp.client")
    files = [*ROOT.glob("examples/**/*.py"), *ROOT.glob("agentrl/project_template/template/**/*.py")]
    assert len(files) > 8
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert module in allowed or module.partition(".")[0] != "agentrl", f"{file}: {module}"


def test_the_page_for_a_package_index_links_nowhere_but_to_addresses() -> None:
    """A package index has no file of the repository, so that a relative link or image would lead nowhere."""
    page = ROOT / tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"?([^\"\s>]+)", text)
    targets += re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"^Extras: (.+?)$", text, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", named)) == {*extras} - {"dev", "docs", "router", "megatron"}


def test_the_constraints_fit_what_the_package_requires() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    project = SETUP_FILE["project"]
    extras = project["optional-dependencies"]
    texts = [
        *project["dependencies"],
        *(text for name, texts in extras.items() if name not in ("sglang", "trackio") for text in texts),
    ]
    for requirement in map(Requirement, texts):
        if requirement.name != project["name"]:
            version = versions[re.sub(r"[-_.]+", "-", requirement.name).lower()]
            assert requirement.specifier.contains(version), f"{requirement}: make constraints"


def test_a_release_has_the_section_of_its_version() -> None:
    """`.github/workflows/release.yml` runs this for a tag."""
    namespace = {"__file__": str(ROOT / ".github" / "release_notes.py"), "__name__": "release_notes"}
    exec((ROOT / ".github" / "release_notes.py").read_text(), namespace)
    notes, project = namespace["release_notes"], '[project]\nversion = "1.2.3"\n'
    changelog = (
        "# Changelog\n\n## [Unreleased]\n\n- c\n\n## [1.2.3] - 2026-12-01\n\n### Added\n\n- b\n\n## [1.2.2]\n\n- a\n"
    )
    assert notes("1.2.3", changelog, project) == "### Added\n\n- b\n"
    with pytest.raises(ValueError, match=r"the tag is v1\.2\.2, and pyproject\.toml has version 1\.2\.3"):
        notes("1.2.2", changelog, project)
    with pytest.raises(ValueError, match=r"no section ## \[1\.2\.3\]"):
        notes("1.2.3", changelog.replace("1.2.3", "1.2.4"), project)
