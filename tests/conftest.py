import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ray_workers
from dockerd import DockerHost, NoDocker, running_dockerd
from preloaded import (
    CHILD_MODULES,
    CHILDREN,
    MEGATRON,
    RUN_MODULES,
    SOCKET,
    WORKERS,
    ForkedStarts,
    fork_server,
    preloaded_process,
    start_imports,
)

# There is a process for every core, and the first one has no threads when it forks. Modules of tests import NumPy before
# options are read.
if any(word.startswith("--forks") for word in sys.argv):
    os.environ["OMP_NUM_THREADS"] = "1"

# In the background of a shell it is ignored; tests interrupt the processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["forked_tests"]
# The bodies of tests that several engines pass.
pytest.register_assert_rewrite("conformance")

# Few examples, the same ones in every run; `make test-long` tries many others. No test sets its own number, save those
# whose single example takes long.
hypothesis.settings.register_profile(
    "lean",
    derandomize=True,
    deadline=None,
    max_examples=16,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.register_profile(
    "thorough", deadline=None, max_examples=400, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("lean")

TESTS = Path(__file__).parent
LONGEST = (
    "integration/test_train.py",
    "attacks/test_attacks.py",
    "integration/test_resume.py",
    "integration/test_ray_start.py",
    "integration/test_examples.py",
    "unit/learner/megatron/test_layouts.py",
    "integration/test_engine_conformance.py",
    "integration/test_placement.py",
    "integration/test_runners.py",
    "integration/test_single_turn.py",
    "integration/test_train_ends.py",
    "integration/test_docker_sandbox.py",
    "integration/test_fleet.py",
    "integration/test_rollout_replay.py",
    "integration/test_canary.py",
    "integration/test_judge_tampering.py",
    "unit/data/test_streams.py",
    "integration/test_inspect_self_checks.py",
    "integration/test_two_ranks.py",
    "integration/test_tool_servers.py",
    "integration/test_learner_ray.py",
    "unit/learner/test_metamorphic.py",
    "unit/learner/megatron/test_ranks.py",
    "unit/sft/test_sft.py",
    "integration/test_self_play.py",
    "integration/test_code_contest.py",
    "unit/render/test_formats.py",
    "unit/render/test_every_template.py",
    "unit/sandbox/test_bubblewrap.py",
    "unit/sandbox/test_runner.py",
    "test_pages.py",
)
"""Where several processes share the tests, these begin; then come the other integration tests, and the rest."""

_SESSION = ExitStack()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; within a file the order stays."""

    def place(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.relative_to(TESTS).as_posix()
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), not name.startswith("integration/")

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Leave what collection makes out of garbage collections, which would look through it again; start no thread.

    A process with threads cannot be forked safely, and modules that are imported would start some.
    """
    gc.disable()
    forks = session.config.getoption("forks") != "0" and not session.config.option.collectonly
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TOKENIZERS_PARALLELISM", "false")
            patch.setenv("JE_ARROW_MALLOC_CONF", "background_thread:false")
            result = yield
            if forks:
                _make_shared_tokenizers()
    finally:
        _propagate_loggers_of_torch()
        gc.freeze()  # without a collection: it takes a second and would free 20 MB
        gc.enable()
    if forks and "tests.unit.learner.megatron.forked" in sys.modules:
        # Its forks are the ranks of all files: each would import Megatron-Core, which takes three seconds.
        os.environ[MEGATRON], end = fork_server("tests.unit.learner.megatron.imports")
        _SESSION.callback(os.close, end)  # before the others, whose standard input it has inherited
    return result


def _make_shared_tokenizers() -> None:
    """Make what most tests of chat formats need, a second's work, before there are forks: Qwen's BPE, and its first part."""
    if tokenizers := sys.modules.get("tests.unit.render.tokenizers"):
        for name in ("qwen3", "llama3"):
            tokenizers.family_tokenizer(name)


def _propagate_loggers_of_torch() -> None:
    """Have pytest capture them at the root logger.

    It adds its handlers to each logger that does not propagate, six times a test, and torch has fifty of these.
    """
    for name, logger in logging.Logger.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch":
            logger.propagate = True


def pytest_configure(config: pytest.Config) -> None:
    forked = config.getoption("forks") != "0"
    for name, modules in ((SOCKET, RUN_MODULES), (WORKERS, ray_workers.MODULES)):
        os.environ[name] = _SESSION.enter_context(preloaded_process(*modules))
        if forked and not config.option.collectonly:
            start_imports(os.environ[name])  # on another core, while this process collects


def pytest_unconfigure(config: pytest.Config) -> None:
    _SESSION.close()


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """What a test leaves in the environment would decide what the tests after it in the same process do."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AGENTRL_")}
    yield
    after = {name: value for name, value in os.environ.items() if name.startswith("AGENTRL_")}
    assert after == before


@pytest.fixture(scope="session")
def dockerd() -> Iterator[DockerHost]:
    """A Docker daemon with an image that has Python; tests that need it are skipped where there can be none."""
    try:
        context = running_dockerd()
        host = context.__enter__()
    except NoDocker as error:
        pytest.skip(f"Docker: {error}")
    try:
        yield host
    finally:
        context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def preloaded_children() -> Iterator[str]:
    """The address of a preloaded process for children of this one."""
    if address := os.environ.get(CHILDREN):
        yield address
        return
    with preloaded_process(*CHILD_MODULES) as address:
        yield address


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Workers of the Ray that a test starts are forks."""
    with ray_workers.forked_workers():
        yield


@pytest.fixture(scope="module")
def forked_starts(preloaded_children: str) -> Iterator[None]:
    """Engines and tool servers that a test starts are forks: they need not import torch again."""
    from agentrl.core import child_process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "subprocess", ForkedStarts(preloaded_children))
        yield
