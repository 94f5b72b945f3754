"""agentrl without the packages of its extras: the core works, and what needs one names the extra."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import preloaded
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agentrl.cli import main as cli
from agentrl.core.extras import DISTRIBUTION, EXTRAS
from agentrl.project_template import create_project

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "faiss": "faiss-cpu",
    "huggingface_hub": "huggingface-hub",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "opentelemetry": "opentelemetry-sdk",
    "reasoning_gym": "reasoning-gym",
    "sglang_router": "sglang-router",
}
"""Names of packages at the index, where they are not those of the import."""

TRAIN = {package for package, extra in EXTRAS.items() if extra == "train"}
"""What the core works without, and training does not."""

COMMANDS = {
    "help": ["--help"],
    "search_r1": ["train", "--env", "search_r1", "--dry-run"],
    "tensorboard": ["train", "--env", "search_r1", "obs.tensorboard=true"],
    "wandb": ["train", "--env", "search_r1", "obs.wandb=offline"],
    "mlflow": ["train", "--env", "search_r1", "obs.mlflow=http://me:secret@127.0.0.1:1"],
    "trackio": ["train", "--env", "search_r1", "obs.trackio=true"],
    "otlp": ["train", "--env", "search_r1", "obs.otlp=http://127.0.0.1:1/v1/traces"],
    "parquet rollouts": ["train", "--env", "search_r1", "obs.rollout_format=parquet"],
    "parquet prompts": ["train", "--env", "single_turn", "data.path=prompts.parquet", "data.label_key=a", "reward=f1"],
    "dataset": ["train", "--env", "single_turn", "data.path=hf:a/b", "data.label_key=a", "reward=f1"],
    "docker": ["train", "--env", "python_math", "sandbox.backend=docker"],
    "two": ["train", "--env", "search_r1", "obs.tensorboard=true", "obs.wandb=online"],
    "e5": ["train", "--env", "search_r1", "tools.search.options.retriever=e5"],
    "router": ["train", "--env", "search_r1", "sampler.router=sglang"],
    "mcp": ["tools", "serve", "mcp", "--port", "0"],
    "sandboxes": ["tools", "sandbox", "--backend", "docker"],
    "viewer": ["view", "run", "--html"],
}
CORE_COMMANDS = {
    "list": ["env", "list"],
    "check": ["env", "check", "search_r1"],
    "check several agents": ["env", "check", "kuhn_poker"],
    "init": ["init", "my_first"],
    "train": ["train", "--env", "search_r1"],
    "eval": ["eval", "--env", "search_r1"],
    "sft": ["sft"],
    "doctor": ["doctor", "run"],
    **{f"help of {command}": [command, "--help"] for command in cli.COMMANDS},
}


def play(
    cwd: Path, packages: set[str], commands: dict[str, list[str]], *, preloads: bool
) -> dict[str, tuple[int, str]]:
    """Status and output of each command, all in one process that cannot import the packages.

    With ``preloads`` it has imported torch before; else it is a new interpreter.
    """
    words = [json.dumps([*packages]), json.dumps(commands)]
    if preloads:
        done = preloaded.run("without_packages:main", words, cwd=cwd, env=dict(os.environ), timeout=240)
    else:
        command = [sys.executable, str(ROOT / "tests" / "without_packages.py"), *words]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (cwd / "runs").exists(), "no run was started"
    return {name: (status, output) for name, (status, output) in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The commands without a package of an extra but ``train``."""
    cwd = tmp_path_factory.mktemp("without-extras")
    (cwd / "prompts.parquet").touch()
    (cwd / "run" / "rollouts").mkdir(parents=True)
    (cwd / "run" / "rollouts" / "step_000001.parquet").touch()
    return play(cwd, {*EXTRAS} - TRAIN, COMMANDS, preloads=True)


def is_needed(requirement: Requirement, extras: Iterable[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)


def undeclared_packages() -> set[str]:
    """Packages that are installed here, and are not where agentrl is installed without extras."""
    names, requirements = set(), [Requirement(text) for text in PROJECT["dependencies"]]
    while requirements:
        requirement = requirements.pop()
        name, extras = canonicalize_name(requirement.name), {"", *requirement.extras}
        if name not in names or requirement.extras:
            names.add(name)
            indirect = map(Requirement, metadata.requires(name) or ())
            requirements += [needed for needed in indirect if is_needed(needed, extras)]
    names.add(canonicalize_name(PROJECT["name"]))
    packages = metadata.packages_distributions().items()
    return {package for package, owners in packages if names.isdisjoint(map(canonicalize_name, owners))}


def test_the_core_needs_no_training_packages(tmp_path: Path) -> None:
    packages = undeclared_packages()
    assert packages > {"torch", "ray", "transformers", "jinja2"}
    results = play(tmp_path, packages | {*EXTRAS}, CORE_COMMANDS, preloads=False)
    for name in results.keys() - {"train", "eval", "sft", "doctor"}:
        assert results[name][0] == 0, results[name]
    assert results["doctor"] == (2, "error: run is no run, because it has no config.yaml")
    for name in ("train", "eval", "sft"):
        status, output = results[name]
        assert status == 2, results[name]
        assert re.search(rf"agentrl {name} needs the package \w+: pip install '{DISTRIBUTION}\[train\]'", output), (
            output
        )
        assert "Traceback" not in output


@pytest.mark.long
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    """What pip installs is what an author of environments needs: the command and the plugins, and no torch."""
    source = tmp_path / "source"  # a build writes into the folder that it builds
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("agentrl", "envs", "tools", "tasks", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "LICENSE", PROJECT["readme"]):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    environment = tmp_path / "environment"
    venv.create(environment)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    create_project(tmp_path / "my_first")
    template = tomllib.loads((tmp_path / "my_first" / "pyproject.toml").read_text())["project"]
    assert template["dependencies"] == [DISTRIBUTION]
    packages = [str(source), *template["optional-dependencies"]["test"]]
    install = subprocess.run(
        [*pip, "install", "--quiet", "--no-compile", *packages], capture_output=True, text=True, timeout=400
    )
    assert install.returncode == 0, install.stdout + install.stderr
    (site_packages,) = environment.glob("lib/python*/site-packages")
    assert not {path.name for path in site_packages.iterdir()} & {"torch", "ray"}
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments, folder, status, expected in (
        (["agentrl", "env", "check", "search_r1"], ".", 0, "passes"),
        (["agentrl", "env", "check", "my_first.env:DirectoryEnv"], "my_first", 0, "passes"),
        (["agentrl", "train", "--env", "search_r1"], ".", 2, f"pip install '{DISTRIBUTION}[train]'"),
        (["pytest"], "my_first", 0, "6 passed"),
    ):
        command = [environment / "bin" / arguments[0], *arguments[1:]]
        done = subprocess.run(
            command, cwd=tmp_path / folder, env=variables, capture_output=True, text=True, timeout=120
        )
        output = " ".join((done.stdout + done.stderr).split())
        assert (done.returncode, expected in output) == (status, True), output


def test_help_and_the_first_command_need_no_extra(played: dict[str, tuple[int, str]]) -> None:
    assert played["help"][0] == 0
    status, output = played["search_r1"]
    assert status == 0, output
    assert "needs the package" not in output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tensorboard",
            "obs.tensorboard=true needs the package tensorboard: pip install 'agentrl-framework[tensorboard]'",
        ),
        ("wandb", "obs.wandb=offline needs the package wandb: pip install 'agentrl-framework[wandb]'"),
        (
            "mlflow",
            "obs.mlflow=http://<redacted>@127.0.0.1:1 needs the package mlflow: pip install 'agentrl-framework[mlflow]'",
        ),
        ("trackio", "obs.trackio=true needs the package trackio: pip install 'agentrl-framework[trackio]'"),
        (
            "otlp",
            "obs.otlp=http://127.0.0.1:1/v1/traces needs the package opentelemetry: pip install 'agentrl-framework[otlp]'",
        ),
        (
            "parquet rollouts",
            "obs.rollout_format=parquet needs the package pyarrow: pip install 'agentrl-framework[parquet]'",
        ),
        (
            "parquet prompts",
            "data.path=prompts.parquet needs the package pyarrow: pip install 'agentrl-framework[parquet]'",
        ),
        ("dataset", "data.path=hf:a/b needs the package datasets: pip install 'agentrl-framework[datasets]'"),
        ("docker", "sandbox.backend=docker needs the package docker: pip install 'agentrl-framework[docker]'"),
        ("two", "obs.wandb=online needs the package wandb: pip install 'agentrl-framework[wandb]'"),
        ("two", "obs.tensorboard=true needs the package tensorboard"),
        ("e5", "tools.search.options.retriever=e5) needs the package faiss: pip install 'agentrl-framework[e5]'"),
        ("router", "needs the package sglang_router: pip install 'agentrl-framework[router]'"),
        ("mcp", "tools.mcp needs the package mcp: pip install 'agentrl-framework[mcp]'"),
        ("sandboxes", "sandbox.backend=docker needs the package docker: pip install 'agentrl-framework[docker]'"),
        ("viewer", "step_000001.parquet needs the package pyarrow: pip install 'agentrl-framework[parquet]'"),
    ],
)
def test_what_needs_an_extra_names_it_before_anything_starts(
    played: dict[str, tuple[int, str]], name: str, message: str
) -> None:
    status, output = played[name]
    assert status == 2, output
    assert message in output
    assert "Traceback" not in output


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=;]", requirement)[0].strip()


def test_each_package_is_in_the_extra_that_the_message_names() -> None:
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert DISTRIBUTIONS.get(package, package) in {name_of(one) for one in extras[extra]}, package
    core = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    assert core & {DISTRIBUTIONS.get(package, package) for package in EXTRAS} == set()


def test_all_is_every_extra_that_any_machine_can_have() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(everything.removeprefix(f"{DISTRIBUTION}[").rstrip("]").split(",")) == {*extras} - {
        "all", "dev", "docs", "megatron", "router", "sglang", "trackio",
    }  # fmt: skip
    assert "agentrl-framework[all,docs,megatron,router]" in extras["dev"]


def test_no_module_imports_an_extra_where_it_is_itself_imported_by_others() -> None:
    """Packages of extras are imported inside functions, but in the modules that their registry imports on lookup."""
    by_name = {"agentrl/containers", "agentrl/learner/megatron", "agentrl/sandbox/docker", "agentrl/toolserver/mcp"}
    for top in ("agentrl", "envs", "tools", "tasks"):
        for path in (ROOT / top).rglob("*.py"):
            where = str(path.relative_to(ROOT))
            if (
                where.startswith((*by_name, "agentrl/inference/launch/cpu_sglang"))
                or where == "tools/agentrl_tools/search/vectors.py"
            ):
                continue
            imported = re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
            assert not {*imported} & ({*EXTRAS} - TRAIN), where
