"""Every command of the README and of the other pages works from a fresh folder, or is refused for what this machine lacks.

``train`` and ``sft`` make a dry run, which checks all that needs no server. Commands that only read or write files run.
The others are parsed, and resolve their configuration; tests of their own run them.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.cli.main import COMMANDS, _parse, build_parser, main
from agentrl.cli.options import resolve_config
from agentrl.config.layers import save_config
from agentrl.config.recorded import recorded_keys
from agentrl.core.registry import model_folder
from agentrl.core.types import FinishReason, Generation, Rollout, StopReason
from agentrl.episode.trajectory import Trajectory
from agentrl.obs.rollouts import RolloutFile
from agentrl.toolserver.options import make_server_config
from agentrl.toolserver.service import make_tools
from tests.fake_machine import write_task
from tests.test_configs import MACHINE
from tests.test_pages import PAGES, ROOT, example
from tests.unit.containers.test_convert import bench_task

FILES = {
    "train.jsonl": '{"prompt": "Say a.", "label": "a", "answer": "a", "name": "a", "facts": {}}\n' * 16,
    "my_chats.jsonl": '{"prompt": "Who?", "completion": "Me."}\n',
    "my_filters.py": "def too_easy(group):\n    return False\n",
    "tasks.jsonl": '{"prompt": "Say a.", "label": "a"}\n',
    "reward.py": "def score(sample):\n    return 1.0\n",
    "my_agent.py": "print('an agent')\n",
    "my_rewards.py": "def score(sample):\n    return 1.0\n\n\ndef brief(sample):\n    return {'score': 1.0}\n",
    "my_tools.py": "def lookup(item: str) -> str:\n    return item\n",
    "rows.jsonl": '{"prompt": "Say a.", "label": "a", "answer": "a"}\n',
    "mine.jsonl": '{"question": "Who?", "golden_answers": ["a"]}\n',
    "held_out.jsonl": "".join(
        f'{{"question": "Who is {number}?", "golden_answers": ["a"]}}\n' for number in range(300)
    ),
    "my_documents.jsonl": '{"id": "1", "contents": "a b"}\n',
    "wiki.jsonl": '{"id": "1", "contents": "a b"}\n',
    "eval.jsonl": '{"id": "1", "contents": "a b"}\n',
    "tools.yaml": "tools: {calculator: {}}\n",
    "tuned.yaml": "rollout: {concurrency: 128}\n",
    "lr.yaml": "learner: {optimizer: {lr: 1.0e-5}}\n",
    "base.yaml": "tasks: {name: multihop}\nrollout: {max_tokens: 640}\n",
    "small.yaml": "train: {steps: 2}\n",
    "hosts.txt": "me@node1\nme@node2\n",
    "my.sbatch.j2": "#SBATCH --job-name={{ name }} --partition={{ settings.partition }}\n",
}
"""What the pages have a reader write, or bring; a page's own examples replace them."""
SWE_ROW = {
    "instance_id": "owner__calc-1",
    "repo": "owner/calc",
    "base_commit": "abcdef0",
    "problem_statement": "add subtracts.",
    "patch": "--- a/calc.py\n",
    "test_patch": "--- a/test_calc.py\n",
    "FAIL_TO_PASS": ["test_calc.py::test_add"],
    "PASS_TO_PASS": [],
}
LACKS = MACHINE | {
    "placement.mode",
    "tools.search.url",
    "tools.python.url",
    "containers.hosts",
    "rollout.agent.harness",
    "obs.trackio",
    "reward.judge.model",
}
"""Keys that ask for GPUs, a tool server that the reader has started, an agent program, a model of the hub, or an extra that
.venv cannot have."""
ADDED = "render.format=plain"
"""The format that the reader of docs/how_to/chat_format.md adds to agentrl itself."""
TUTORIALS = ROOT / "docs" / "tutorials"
FOREIGN = ("url=http://127.0.0.1:8000", "vf/bin/python")
"""A server of OpenEnv or NeMo Gym that the reader has started, and an interpreter with verifiers: tests/with_environments and
tests/with_agents run such commands."""
RUN_HERE = {"data", "doctor", "init", "env", "template", "models", "plan", "launch"}
"""Commands that only read or write files."""


@dataclass(frozen=True)
class Command:
    """A line of a page."""

    page: Path
    line: str

    @property
    def words(self) -> list[str]:
        """What follows ``agentrl``, as a shell passes it, with the shipped policy in place of a model of the reader's."""
        words = shlex.split(self.line, comments=True)[1:]
        return [filled_in(os.path.expanduser(os.path.expandvars(word))) for word in words]


def blocks(page: Path) -> list[str]:
    """Return the blocks of a page that are lines of a shell: those without a language."""
    blocks = re.findall(r"^ *```(\S*)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in blocks if language in ("", "bash")]


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page, but those with an … for what the reader fills in."""
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if not re.match(r"\s*(?:\S*/)?agentrl\s", line) or "…" in line:
                continue
            yield Command(page, line.strip())


def filled_in(word: str) -> str:
    policy = model_folder("multihop-warm")
    assert policy is not None
    if word == "FILE":
        return str(policy / "chat_template.jinja")
    return re.sub(r"(?:/path/to/[\w/]+|\bDIR)$", lambda _: str(policy), word)


def key(command: Command) -> str:
    """The line; a page of an example has files of its own, so that the same line is another command there."""
    of = f"{command.page.parent.name}: " if command.page.parent.parent == ROOT / "examples" else ""
    return of + " ".join(shlex.split(command.line, comments=True))


ALL = {key(command): command for page in PAGES for command in commands(page)}
"""Each command once."""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder with the files that the command's page shows; an example's page lies among its files."""
    page = ALL[request.node.callspec.params["line"]].page
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    if page.parent.parent == ROOT / "examples":
        shutil.copytree(page.parent, tmp_path, dirs_exist_ok=True)
    tutorials = page.parent == TUTORIALS  # a later one uses files of earlier ones
    for shown in sorted(TUTORIALS.glob("*.md")) if tutorials else [page]:
        for name in re.findall(r"<!-- example: (\S+) -->", shown.read_text()):
            (tmp_path / name).write_text(example(name, shown))
    if page.name == "data_formats.md":
        shutil.copytree(ROOT / "tests" / "unit" / "data" / "rows", tmp_path, dirs_exist_ok=True)
    if tutorials:
        row = '{"prompt": "Who?", "label": "a", "pages": {}}\n'
        (tmp_path / "train.jsonl").write_text(row)
        (tmp_path / "eval.jsonl").write_text(row.replace("Who", "What") * 50)
    folders = r"(?:data\.(?:eval_)?path=|data show )(tasks|data/(?:exercises|tasks|held_out))\b/?(?= |$)"
    for tasks in re.findall(folders, request.node.callspec.params["line"]):
        write_task(tmp_path / tasks / "count_lines", "debian:12", "echo 1 > /logs/verifier/reward.txt\n")
    if "data convert" in request.node.callspec.params["line"]:
        (tmp_path / "swe_rows.jsonl").write_text(json.dumps(SWE_ROW) + "\n")
        bench_task(tmp_path / "terminal-bench" / "tasks" / "hello")
    monkeypatch.chdir(tmp_path)
    words = ALL[request.node.callspec.params["line"]].words
    if "--resume" in words:
        add_run(next((word[8:] for word in words if word.startswith("run.dir=")), "runs/search_r1-20261121-120000"))
    if words[0] == "doctor":
        add_run(words[1])
    if page.name == "checkpoints.md":
        add_run("runs/first")
    if any(word.startswith("sft.rollouts.path=") for word in words):
        file = RolloutFile(tmp_path / "runs" / "first" / "rollouts" / "step_000001.jsonl")
        trajectory = Trajectory()
        trajectory.extend_to((5, 6), added=2)
        trajectory.append_sampled(Generation((7,), (-1.0,), FinishReason.STOP, ((0, 0),), request_id="r"))
        file.write(Rollout("a", "1/0/0", trajectory.rows("a", "1/0/0"), 1.0, StopReason.TERMINATED))
    return tmp_path


def add_run(name: str) -> None:
    """Write the folder of a run that has a checkpoint, and a secret in its configuration."""
    words = ["train", "--env", "search_r1", "tools.search.options.client.token=0123456789abcdef"]
    config = resolve_config(build_parser("train").parse_args(words))
    checkpoint = Path(name) / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    state = {"step": 1, "position": 8, "keys": recorded_keys(config)}
    (checkpoint / "state.json").write_text(json.dumps(state))
    save_config(config, Path(name))


def play(words: list[str]) -> tuple[int, str]:
    """Run a command line in this process; return its status and output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(words)
    return status, out.getvalue()


def written_in(folder: Path) -> set[Path]:
    """Return what lies in a folder, without the bytecode of modules that were imported from it."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_pages_have_commands() -> None:
    assert len(ALL) > 60
    assert {command.words[0] for command in ALL.values()} == {*COMMANDS}


@pytest.mark.parametrize("line", [*ALL])
def test_command(line: str, folder: Path) -> None:
    words = ALL[line].words
    is_foreign = any(part in line for part in FOREIGN)
    if words[0] in ("train", "sft") and "--replay" not in words and not is_foreign:
        state_before = written_in(folder)
        status, rollout = play([*words, *({"--dry-run"} - {*words})])
        assert status == 0, rollout
        lacks = re.findall(r"^missing here (.+)$", rollout, re.MULTILINE)
        assert all(re.split(r"[=,]", lack)[0] in LACKS for lack in lacks), lacks
        assert written_in(folder) == state_before, "a dry run writes nothing"
    elif words[0] in RUN_HERE and not is_foreign and words[:2] != ["models", "get"] and ADDED not in words:
        status, rollout = play(words)
        assert status == 0, rollout
    else:
        parsed = _parse(build_parser(words[0]), words)
        if hasattr(parsed, "env") and not getattr(parsed, "checkpoint", None):
            resolve_config(parsed)
        if words[:2] == ["tools", "serve"] and hasattr(parsed, "overrides"):
            make_tools(make_server_config(parsed.config, parsed.overrides, [parsed.tool] if parsed.tool else []))


def test_the_page_of_the_command_line_is_current() -> None:
    """In a process that no other test has registered names in."""
    code = "import runpy; print(runpy.run_path('docs/make_command_line.py')['reference'](), end='')"
    page = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert page == (ROOT / "docs" / "reference" / "command_line.md").read_text(), "run `make docs`"


def test_make_policies_has_a_recipe_for_every_shipped_policy() -> None:
    lines = re.search(r"^policies:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lines is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, target in project["entry-points"]["agentrl.models"].items():
        package, _, _ = target.partition(".policies:")
        assert f"-m {package}.make_policy " in lines[1], name
    for config in re.findall(r"--config (\S+)", lines[1]):
        assert (ROOT / "configs" / "agentrl_configs" / f"{config}.yaml").is_file(), config


def test_named_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"^(?:sudo )?make ([\w-]+)", "\n".join(blocks(page)), re.MULTILINE)
        assert {*named} <= targets, page
