"""Engines that stay after a run: the next one takes them, a lock decides whose they are, and a keeper ends them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from deadlines import until, wait_for_exit, wait_until

from agentrl.cli.main import main
from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import ConfigError, EngineError
from agentrl.inference.launch import keeper, kept_engines
from agentrl.inference.launch.kept_engines import (
    EXIT,
    UNTIL,
    KeptChild,
    end_engines_below,
    end_engines_on,
    engines_folder,
    free_engines,
    take_engine,
)
from agentrl.inference.launch.launcher import EngineSpec, LocalLauncher, launch
from agentrl.inference.launch.processes import EngineProcess
from tests.unit.inference.test_launch import install_stand_in

SOON = 0.001
"""Minutes."""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without kept engines, and with a stand-in for SGLang, which answers at once."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    install_stand_in(tmp_path, monkeypatch)
    (tmp_path / "sglang" / "gate").touch()


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    sampler = SamplerConfig(backend="sglang", sglang={"device": "cpu"}, start_timeout_s=30)
    return EngineSpec(sampler, tmp_path / "model", tmp_path, 0, keep_minutes=10.0)


def pid(engine: EngineProcess) -> int:
    assert isinstance(engine.child, KeptChild)
    return engine.child.pid


def test_the_next_run_takes_the_engine_that_one_has_left(spec: EngineSpec, tmp_path: Path) -> None:
    first = spec.start(0)
    first_pid = pid(first)
    try:
        assert not first.start_details.startswith("an earlier run")
        first.release()
        second = replace(spec, seed=5, logs=tmp_path / "another run").start(0)
        assert (pid(second), second.url, second.start_details) == (first_pid, first.url, "an earlier run has left it")
        second.check()
    finally:
        first.child.kill()
    wait_for_exit(first_pid)
    with pytest.raises(EngineError, match=r"signal SIGKILL.*engine-0\.log"):
        wait_until(lambda: second.check())
    second.stop()
    wait_until(lambda: not [*engines_folder().iterdir()])


def test_an_engine_with_other_options_tokens_or_gpus_is_not_taken(spec: EngineSpec, tmp_path: Path) -> None:
    def key(changed: EngineSpec, gpus: tuple[str, ...] = ()) -> str:
        return changed._key(0, "127.0.0.1", gpus)

    options = spec.config.model_copy(update={"sglang": {"device": "cpu", "context_length": 99}})
    other_keys = [key(replace(spec, config=options)), key(replace(spec, trust_remote_code=True)), key(spec, ("1",))]
    other_keys.append(key(replace(spec, returns_experts=True)))
    other_keys.append(key(replace(spec, config=spec.config.model_copy(update={"port": 30000}))))
    original = key(spec)
    assert key(replace(spec, seed=9)) == original, "SGLang's samples depend on more than the seed"
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 8, "dtype": "bfloat16"}')
    of_config = key(spec)
    (tmp_path / "model" / "config.json").write_text(
        '{"dtype": "bfloat16", "hidden_size": 8, "transformers_version": "5"}'
    )
    assert key(spec) == of_config, "a checkpoint of the same model"
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 9, "dtype": "bfloat16"}')
    other_keys.append(key(spec))
    (tmp_path / "model" / "tokenizer.json").write_text("[]")
    assert len({original, of_config, key(spec), *other_keys}) == 9
    engine = spec.start(0)
    try:
        engine.release()
        assert take_engine(original, 1.0) is None
    finally:
        engine.child.kill()
        wait_for_exit(pid(engine))


def test_one_run_at_a_time_has_an_engine_that_is_no_process_of_its_ray(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends a run's Ray finds its processes by this variable, which an engine's host has."""
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    engine = spec.start(0)
    process = psutil.Process(pid(engine))
    keeper = process.parent()
    try:
        assert keeper is not None
        assert "RAY_RAYLET_PID" not in process.environ() | keeper.environ()
        assert take_engine(spec._key(0, "127.0.0.1", ()), 1.0) is None
    finally:
        engine.stop()


@pytest.mark.parametrize("how", ["killed run", "not taken"])
def test_the_keeper_ends_what_no_run_may_use(spec: EngineSpec, how: str) -> None:
    engine = replace(spec, keep_minutes=SOON).start(0)
    engine_pid = pid(engine)
    assert isinstance(engine.child, KeptChild)
    if how == "killed run":
        engine.child.unlock()  # as the kernel does
    else:
        engine.release()
    wait_for_exit(engine_pid)
    wait_until(lambda: not [*engines_folder().iterdir()])


def test_an_engine_ends_with_its_keeper(spec: EngineSpec) -> None:
    engine = spec.start(0)
    assert isinstance(engine.child, KeptChild)
    engine_pid = pid(engine)
    keeper = psutil.Process(engine_pid).parent()
    assert keeper is not None
    assert keeper.ppid() != os.getpid(), "what ends the children of a run's process does not end the keeper"
    keeper.send_signal(signal.SIGKILL)
    wait_for_exit(engine_pid)
    wait_until(lambda: not engine.child.alive())  # the kernel closes the keeper's files one after the other
    with pytest.raises(EngineError, match="SIGKILL"):
        engine.check()
    (engine.child.folder / UNTIL).write_text("1e12")
    engine.child.unlock()
    assert not [*free_engines()], "nothing can take what its keeper has left"
    assert not [*engines_folder().iterdir()]


@pytest.mark.parametrize("by", ["its GPU", "its port", "the folder of its log"])
def test_a_free_engine_is_ended_by(spec: EngineSpec, by: str) -> None:
    engine = spec.start(0, gpus=("1",))
    engine_pid = pid(engine)
    engine.release()
    end_engines_on([])
    end_engines_on(["0"])
    end_engines_below(Path(engine.log).parent / "other")
    assert psutil.pid_exists(engine_pid)
    if by == "its GPU":
        end_engines_on(["0", "1"])
    elif by == "its port":
        end_engines_on([], urlsplit(engine.url).port or 0)
    else:
        end_engines_below(Path(engine.log).parent.parent)
    wait_for_exit(engine_pid)


def test_a_cancelled_start_leaves_nothing(spec: EngineSpec, tmp_path: Path) -> None:
    (tmp_path / "sglang" / "gate").unlink()

    async def start_and_cancel() -> int:
        starting = asyncio.create_task(launch(lambda: LocalLauncher(spec).launch(0), "engine-0"))
        await until(lambda: bool([*engines_folder().glob("*/pid")]))
        [file] = engines_folder().glob("*/pid")
        engine_pid = int(file.read_text())
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        return engine_pid

    wait_for_exit(asyncio.run(start_and_cancel()), 10)
    assert not [*engines_folder().iterdir()]


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1 + os.geteuid())
    with pytest.raises(ConfigError, match="belongs to another user; set XDG_RUNTIME_DIR"):
        engines_folder()


def test_the_command_lists_and_ends_them(spec: EngineSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines"]) == 0
    assert "no engines" in capsys.readouterr().out
    engine = spec.start(0)
    engine_pid = pid(engine)
    assert main(["engines"]) == 0
    assert f"{engine.url}  a run uses it" in capsys.readouterr().out
    assert main(["engines", "--end", engine.url]) == 2
    assert "no free engine has this address" in capsys.readouterr().err
    engine.release()
    assert main(["engines"]) == 0
    assert "free, ends in 10.0 minutes" in capsys.readouterr().out
    assert main(["engines", "--end"]) == 0
    assert f"{engine.url} has ended" in capsys.readouterr().out
    wait_for_exit(engine_pid)


def test_a_runtime_folder_that_is_not_there_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(kept_engines.tempfile, "tempdir", str(tmp_path))
    assert kept_engines.user_folder() == tmp_path / f"agentrl-{os.getuid()}"
    (tmp_path / "run").mkdir()
    assert kept_engines.user_folder() == tmp_path / "run" / "agentrl"


def test_a_keeper_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(kept_engines, "_KEEPER_S", 0.1)
    monkeypatch.setattr(kept_engines.sys, "executable", str(python))
    with pytest.raises(EngineError, match="the engine does not start"):
        KeptChild.start_kept(1.0, ["true"], log=tmp_path / "log", name="the engine", env={}, error=EngineError)


def test_a_keeper_ends_whole_if_its_run_removes_the_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write = tmp_path / "engine", keeper._write
    folder.mkdir()

    def write_and_remove(file: Path, number: int) -> None:
        write(file, number)
        if file.name == EXIT:
            shutil.rmtree(folder)

    monkeypatch.setattr(keeper, "_write", write_and_remove)
    keeper.keep(folder, tmp_path / "log", ["/bin/true"])
    assert not folder.exists()
