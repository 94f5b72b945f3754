"""What the tests on a GPU share. SGLang takes a minute or more to start there: all that is wanted starts at once.

Each test says where it is, with the time (``log_cli_level`` is set here), and ends after ten minutes at most. A test that fails
shows the ends of the logs that were written meanwhile: engines' and runs'.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

from conformance.engine import Engine, Traits, running
from fault_injection import whole_run

from agentrl.config.learner import LearnerConfig, LoraConfig, OptimizerConfig
from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import ModelError
from agentrl.distributed.sglang_loader import LOADER
from agentrl.inference.launch.launcher import visible_gpus
from agentrl.inference.launch.processes import EngineProcess, launch_sglang
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.models.load import load_tokenizer
from agentrl.models.random_models import Shape, write_random_model
from agentrl.models.resolve import resolve_model
from agentrl.weight_sync.adapter import with_adapters
from tests.algo_config import make_algo
from tests.gpu.engine_options import OPTIONS, START_S

EXPERTS = Shape(256, 768, 2, 4, 2, 64, 49152, False, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
LORA = LoraConfig(rank=16, alpha=32)
STRUCK_S = 280.0
"""From one strike of the run to the next, a start of SGLang included."""
THINGS = ("a bridge", "yeast", "a compass", "a sonnet", "insulin", "a prime number", "a violin", "chalk", "gravity",
          "an eclipse", "a sail", "a lighthouse", "a dictionary", "salt", "a parliament", "a telescope")  # fmt: skip
FIGURES: list[str] = []
"""What was measured, shown at the end."""

LOGS = pytest.StashKey[Path]()
"""Folder of all temporary files of the session, logs among them."""
LOG_LINES = 40

Start = Callable[[], AbstractContextManager[Any]]
_log = logging.getLogger(__name__)


def pytest_configure(config: pytest.Config) -> None:
    """Show warnings as they are logged, those of slow starts among them."""
    if config.option.log_cli_level is None:
        config.option.log_cli_level = "WARNING"
        config.option.log_cli_format = "%(asctime)s %(name)s: %(message)s"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the ends of the logs that were written during a test that failed."""
    report = yield
    root = item.config.stash.get(LOGS, None)
    if report.failed and root is not None:
        logs = [path for name in ("*.log", "output.txt") for path in root.rglob(name) if path.is_file()]
        for log in sorted(logs):
            if log.stat().st_mtime >= call.start:
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                report.sections.append((f"end of {log.relative_to(root)}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session", autouse=True)
def logs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Note where the logs are."""
    request.config.stash[LOGS] = tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Skip everything where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="session")
def sglang(gpu: None) -> None:
    """Skip what needs an engine if there is no SGLang beside agentrl."""
    if not has_sglang():
        pytest.skip("SGLang is not installed in this interpreter")


def has_sglang() -> bool:
    """Return whether engines can start."""
    return importlib.util.find_spec("sglang") is not None


@pytest.fixture(scope="session")
def smollm2(gpu: None) -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    try:
        return resolve_model("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def begun(
    gpu: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """By fixture, what takes long; of the fixtures that any test wants. All are ended at the end."""
    expected = {name for item in request.session.items for name in getattr(item, "fixturenames", ()) if has_sglang()}
    root = tmp_path_factory.mktemp("gpu")
    starts: dict[str, Start] = {
        "struck_run": lambda: struck(root / "run"),
        "near_engine": lambda: serving(root / "near.log", 0),
        "adapter_engine": lambda: serving(root / "adapters.log", 0, adapters=True),
        "moe_engine": lambda: experts(root),
    }
    if "tiny_engine" in expected:
        tiny_engine = tiny(root / "tiny")
        starts["tiny_engine"] = lambda: tiny_engine
    if torch.cuda.device_count() > 1:
        starts["far_engine"] = lambda: serving(root / "far.log", 1)
    if {"struck_run", "near_engine", "far_engine", "adapter_engine", "moe_engine"} & expected:
        with contextlib.suppress(ModelError):  # said by the fixture
            resolve_model("smollm2-135m")  # once: it may have to be made
    with ExitStack() as exits, ThreadPoolExecutor() as pool:

        def enter(name: str, start: Start) -> Any:
            begun = time.monotonic()
            _log.warning("%s starts", name)
            manager = start()
            value = manager.__enter__()
            exits.push(manager)
            _log.warning("%s is ready after %.0f s", name, time.monotonic() - begun)
            return value

        yield {name: pool.submit(enter, name, start) for name, start in starts.items() if name in expected}


@contextmanager
def serving(log: Path, number: int, *, adapters: bool = False) -> Iterator[EngineProcess]:
    """SGLang with SmolLM2 on one of the GPUs."""
    model, options = resolve_model("smollm2-135m"), OPTIONS
    if adapters:
        options = with_adapters(SamplerConfig(sglang=OPTIONS | {"enable_memory_saver": False}), LORA, model).sglang
    engine = launch_sglang(model, log=log, options=options, gpus=[visible_gpus()[number]], timeout_s=START_S)
    try:
        yield engine
        engine.check()
    finally:
        engine.stop()


@contextmanager
def experts(root: Path) -> Iterator[tuple[Path, EngineProcess]]:
    """A random model with experts, its folder and SGLang with it on the learner's GPU."""
    folder = root / "experts"
    write_random_model(folder, EXPERTS, tokenizer=resolve_model("smollm2-135m"), weights=True)
    log = root / "experts.log"
    engine = launch_sglang(folder, log=log, options=OPTIONS, gpus=visible_gpus()[:1], timeout_s=START_S)
    try:
        yield folder, engine
        engine.check()
    finally:
        engine.stop()


def tiny(root: Path) -> AbstractContextManager[Engine]:
    """SGLang with a random model of two layers, whose sizes its kernels take."""
    traits = Traits(
        seeds=False,
        refuses_unfit_weights=False,
        tolerance=0.5,
        dtype=torch.bfloat16,
        check="version",
        changes_beside_held=False,  # of 0.5.17
        exact=False,
    )
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}

    def start(folder: Path, log: Path) -> EngineProcess:
        options = OPTIONS | {"custom_weight_loader": [LOADER]}
        return launch_sglang(folder, log=log, options=options, gpus=visible_gpus()[:1], timeout_s=START_S)

    return running(start, traits, root, family="llama", dtype=traits.dtype, **sizes)


@contextmanager
def struck(folder: Path) -> Iterator[list[dict[str, float]]]:
    """Learner and engine on one GPU in turns; the engine is killed in step 1 and stopped in step 2. A few minutes."""
    folder.mkdir()
    options = OPTIONS | {"disable_cuda_graph": True}
    settings: dict[str, Any] = {
        "model.path": "smollm2-135m",
        "placement.mode": "colocate",
        "sampler.backend": "sglang",
        **{f"sampler.sglang.{key}": _word(value) for key, value in options.items() if not key.startswith("cuda_graph")},
        "sampler.max_new_tokens": 48,
        "sampler.stall_timeout_s": 15,
        "sampler.update_timeout_s": 15,
        "rollout.max_turns": 5,
        "rollout.max_tokens": 1024,
        # An episode is over in a second or two: these are played one after the other.
        "rollout.concurrency": 8,
        "batch.tokens_per_micro": 8192,
        # Nothing that this policy says is rewarded: the KL term has it trained all the same.
        "algo.kl_coef": 0.001,
        "learner.device": "cuda",
        "learner.precision": "bfloat16",
        "weights.transport": "ipc",
        "weights.dtype": "bfloat16",
    }
    strikes = {1: signal.SIGKILL, 2: signal.SIGSTOP}
    yield whole_run(folder, settings, steps=3, prompts=16, strikes=strikes, fresh=True, timeout_s=STRUCK_S)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what was measured."""
    if FIGURES:
        terminalreporter.section("measured")
        for line in FIGURES:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def tiny_engine(sglang: None, begun: dict[str, Future[Any]]) -> Engine:
    """See `tiny`."""
    engine: Engine = begun["tiny_engine"].result()
    return engine


@pytest.fixture(scope="session")
def near_engine(sglang: None, begun: dict[str, Future[Any]], smollm2: Path) -> EngineProcess:
    """SGLang with SmolLM2 on the learner's GPU."""
    engine: EngineProcess = begun["near_engine"].result()
    return engine


@pytest.fixture(scope="session")
def moe_engine(sglang: None, begun: dict[str, Future[Any]], smollm2: Path) -> tuple[Path, EngineProcess]:
    """See `experts`."""
    engine: tuple[Path, EngineProcess] = begun["moe_engine"].result()
    return engine


@pytest.fixture(scope="session")
def lora() -> LoraConfig:
    """Return the adapters of `adapter_engine`."""
    return LORA


@pytest.fixture(scope="session")
def adapter_engine(sglang: None, begun: dict[str, Future[Any]], smollm2: Path) -> EngineProcess:
    """SGLang with SmolLM2 and LoRA on the learner's GPU."""
    engine: EngineProcess = begun["adapter_engine"].result()
    return engine


@pytest.fixture(scope="session")
def far_engine(sglang: None, begun: dict[str, Future[Any]], smollm2: Path) -> EngineProcess:
    """SGLang with SmolLM2 on another GPU than the learner's."""
    if "far_engine" not in begun:
        pytest.skip("there is one GPU only, two are wanted")
    engine: EngineProcess = begun["far_engine"].result()
    return engine


@pytest.fixture(scope="session")
def struck_run(sglang: None, begun: dict[str, Future[Any]], smollm2: Path) -> list[dict[str, float]]:
    """The rows of a run that was struck; see `struck`."""
    rows: list[dict[str, float]] = begun["struck_run"].result()
    return rows


@pytest.fixture(scope="session")
def learner(smollm2: Path) -> Iterator[LocalLearnerGroup]:
    """SmolLM2 on the first GPU; in bfloat16, as runs on a GPU have it. What it rounds is left out by `in_float32`."""
    config = LearnerConfig(device="cuda", precision="bfloat16", optimizer=OptimizerConfig(lr=3e-5))
    learner = LocalLearnerGroup(smollm2, config, make_algo(), seed=0)
    yield learner
    learner.close()


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> list[list[int]]:
    """Each question twice, as the policy's chat format asks it."""
    tokenizer: Any = load_tokenizer(smollm2)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"In two sentences: what is {thing}, and what is it good for?"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for thing in THINGS
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts for _ in range(2)]


@pytest.fixture(scope="session")
def figures() -> list[str]:
    """Lines to show at the end."""
    return FIGURES
