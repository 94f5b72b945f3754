"""The pages of docs/: links lead somewhere, named files exist, and examples run."""

import os
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import preloaded
import pytest
from pydantic import BaseModel

import agentrl
import agentrl.testing
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.config.tasks import DataConfig
from agentrl.core.errors import ConfigError
from agentrl.core.registry import GROUPS
from agentrl.data.file_tasks import read_tasks
from agentrl.data.task_sources import open_tasks, read_splits
from tests.test_readme import example

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in {"runs", "template"} for part in path.relative_to(ROOT).parts)
)
DATA_FILES = ROOT / "docs" / "how_to" / "data_files.md"
GUIDES = (
    "how_to/algorithm", "how_to/chat_format", "how_to/data_sources", "how_to/environment", "how_to/evaluation",
    "how_to/learner", "how_to/mixed", "how_to/multi_agent", "how_to/reward", "how_to/sandbox_backend",
    "how_to/tasksets", "how_to/tool", "how_to/weight_transport", "tutorials/2_your_environment",
    "tutorials/3_your_tool_in_a_sandbox",
)  # fmt: skip
"""Guides to what users write; each shows a test of it."""
API = ROOT / "docs" / "reference" / "api.md"
SHORT_FORMS = {"env.tools"}
"""Keys that `agentrl.config.load` reads as others."""
TOP_FOLDERS = "agentrl|configs|docs|envs|examples|tasks|tests|tools"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_modules_and_files_exist(page: Path) -> None:
    text = page.read_text()
    added = {Path(file).stem for file in re.findall(r"<!-- example: (\S+) -->", text)}  # by the reader of the page
    for path in set(re.findall(rf"`((?:{TOP_FOLDERS})/[\w./]+)`", text)):
        assert (ROOT / path).exists() or added & {*Path(path).parts, Path(path).stem}, path
    for dotted in set(re.findall(r"`(agentrl(?:\.\w+)+)`", text)):
        assert exists(dotted), dotted


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module of agentrl, an entry-point group, or a name that a module of it defines."""
    if dotted in GROUPS:
        return True
    path = ROOT.joinpath(*dotted.split("."))
    if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
        return True
    module, last = path.parent, path.name
    files = [module.with_suffix(".py"), module / "__init__.py"]
    return any(file.exists() and re.search(rf"\b{last}\b", file.read_text()) for file in files)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_configuration_keys_exist(page: Path) -> None:
    text = page.read_text()
    if page.parent.name == "coming_from":  # the first column has keys of other frameworks
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    for key in set(re.findall(r"(?<![\w./-])([a-z]+(?:\.[a-z_]+)+)(?==|`)", text)):
        names = key.split(".")
        if key in SHORT_FORMS:
            continue
        if names[0] in Config.model_fields and names[-1] not in {"py", "md", "yaml", "json", "jsonl"}:
            assert is_key(names, Config), key


def is_key(names: list[str], section: object) -> bool:
    """Whether a dotted key is in the configuration; options below a key that is no section are passed on."""
    if not names or not (isinstance(section, type) and issubclass(section, BaseModel)):
        return True
    field = section.model_fields.get(names[0])
    return field is not None and is_key(names[1:], field.annotation)


def test_every_page_is_in_the_navigation() -> None:
    """``make site`` checks more: MkDocs with strict validation."""
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"package_index.md"}
    navigation = re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.MULTILINE)
    assert pages == {*navigation} - {"CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
    assert len(navigation) == len({*navigation})


@pytest.mark.parametrize("module", [agentrl, agentrl.testing], ids=["agentrl", "testing"])
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    lists = re.findall(rf"^::: {module.__name__}\n(?: .*\n)*?      members: \[(.*)\]$", API.read_text(), re.MULTILINE)
    assert sorted(name for names in lists for name in names.split(", ")) == sorted(module.__all__)


def test_names_in_the_specification_exist() -> None:
    folders = ("agentrl", "envs", "tools", "tasks")
    code = "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    known_words = set(
        re.findall(r"\w+", code + (ROOT / "Makefile").read_text() + (ROOT / "pyproject.toml").read_text())
    )
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / "design.md").read_text(), flags=re.DOTALL)
    named = {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"[A-Za-z_]\w{2,}", span)}
    assert named - known_words == set()


def test_examples_of_guides_run(tmp_path: Path) -> None:
    """The files of all pages are put into one folder, where one pytest runs their tests."""
    guides = {ROOT / "docs" / f"{guide}.md" for guide in GUIDES}
    examples = [(file, page) for page in guides for file in re.findall(r"<!-- example: (\S+) -->", page.read_text())]
    for file, page in examples:
        assert not (tmp_path / file).exists(), f"{file} is on two pages"
        (tmp_path / file).write_text(example(file, page))
    assert {page for file, page in examples if file.startswith("test_")} == guides, "each page shows a test"
    words = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=.", "."]
    done = preloaded.run("pytest:console_main", words, cwd=tmp_path, env=dict(os.environ), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reward_of_the_page_on_python_fits_the_tasks_of_its_run() -> None:
    code = re.search(r"```python\n(.*?)run = ", (ROOT / "docs" / "how_to" / "python.md").read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    config = load_config(None, ["tasks.name=multihop"])
    [task, *_] = read_splits(config, open_tasks(config))[""]
    assert isinstance(task, agentrl.Task)
    wrong, right = (SimpleNamespace(label=task.answer, response=text) for text in ("", f"It is {task.answer[0]}."))
    assert (names["score"](wrong), names["score"](right)) == (0.0, 1.0)


def test_refusals_of_data_files_read_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = re.findall(r"^\| `([{\[].*)` \| `(train\.jsonl.*)` \|$", DATA_FILES.read_text(), re.MULTILINE)
    assert len(rows) > 5
    for row, message in rows:
        Path("train.jsonl").write_text(row)
        with pytest.raises(ConfigError) as refused:
            read_tasks(Path("train.jsonl"), DataConfig())
        assert str(refused.value) == message
