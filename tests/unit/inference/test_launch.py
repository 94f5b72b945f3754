import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deadlines import until, wait_for_exit, wait_until

from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import ConfigError, EngineError, PortInUseError
from agentrl.inference.launch.interpreter import Interpreter
from agentrl.inference.launch.launcher import EngineSpec, engine_gpus, launch
from agentrl.inference.launch.processes import command_flags, launch_embedded, launch_sglang


def test_a_port_in_use_names_the_key(tmp_path: Path) -> None:
    with socket.socket() as other_socket:
        other_socket.bind(("127.0.0.1", 0))
        other_socket.listen()
        port = other_socket.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"sampler\.port={port} .*sampler\.port to a free port"):
            launch_embedded(tmp_path, log=tmp_path / "log", port=port)


def test_the_error_of_an_engine_that_dies_has_the_cause(forked_starts: None, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)exit status 1.*ModelError.*nowhere"):
        launch_embedded(tmp_path / "nowhere", log=tmp_path / "log", timeout_s=60)


def test_sglang_that_is_not_installed_is_named(tmp_path: Path) -> None:
    lacking = Interpreter(Path("python"), sglang=False, gpu=False, kernels=False)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl-framework\[sglang\]'"):
        lacking.require_sglang(chosen=False)
    with pytest.raises(ConfigError, match=r"sampler\.sglang\.python=python: SGLang is not installed there"):
        lacking.require_sglang(chosen=True)
    for python in (tmp_path / "nowhere", Path("/bin/false")):
        with pytest.raises(ConfigError, match=rf"sampler\.sglang\.python={python} is not a working Python"):
            launch_sglang(tmp_path, log=tmp_path / "log", python=python)


SGLANG = """
import argparse, http.server, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
arguments, _ = parser.parse_known_args()
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION") != "false":
            time.sleep(2)
        self.send_response(200)
        self.end_headers()
pathlib.Path(sys.argv[0]).with_name("port").write_text(str(arguments.port))
pathlib.Path(sys.argv[0]).with_name("pid").write_text(str(os.getpid()))
gate = pathlib.Path(sys.argv[0]).with_name("gate")
while not gate.exists():
    time.sleep(0.01)
http.server.HTTPServer(("127.0.0.1", arguments.port), Health).serve_forever()
"""


def install_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str = SGLANG) -> None:
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_start_that_is_cancelled_ends_the_engine_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that never becomes healthy; a start may take ten minutes."""
    install_stand_in(tmp_path, monkeypatch)

    async def start_and_cancel() -> int:
        start = partial(launch_sglang, tmp_path, log=tmp_path / "log", timeout_s=600)
        starting = asyncio.create_task(launch(start, "engine-0"))
        pid = tmp_path / "sglang" / "pid"
        await until(lambda: pid.exists() and bool(pid.read_text()))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        return int(pid.read_text())

    wait_for_exit(asyncio.run(start_and_cancel()), 10)


def test_an_engine_that_starts_while_it_is_cancelled_is_stopped() -> None:
    started, cancelled = threading.Event(), threading.Event()
    stopped: list[str] = []

    class Engine:
        url = log = ""

        def check(self) -> None: ...

        def log_tail(self, lines: int = 20) -> str:
            return ""

        def stop(self) -> None:
            stopped.append("engine")

        def kill(self) -> None: ...

    def start() -> Engine:
        started.set()
        cancelled.wait()
        return Engine()

    async def start_and_cancel() -> None:
        starting = asyncio.create_task(launch(start, "engine-0"))
        await until(started.is_set)
        starting.cancel()
        asyncio.get_running_loop().call_soon(cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(start_and_cancel())
    assert stopped == ["engine"]


def test_sglangs_port_is_kept_for_it_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that binds its port only when the test has tried to take it. Its health takes long if it samples for it."""
    install_stand_in(tmp_path, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(launch_sglang, tmp_path, log=tmp_path / "log", timeout_s=30)
        try:
            port = wait_for_number(tmp_path / "sglang" / "port")
            with socket.socket() as thief, pytest.raises(OSError, match="in use"):
                thief.bind(("127.0.0.1", port))
        finally:
            (tmp_path / "sglang" / "gate").touch()
        engine = starting.result()
    try:
        assert engine.url == f"http://127.0.0.1:{port}"
        assert engine.child.alive()
    finally:
        engine.stop()


def wait_for_number(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_engines_that_share_a_gpu_take_its_memory_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins that load weights until the test lets them; then they capture graphs."""
    code = SGLANG.replace("gate =", "print('Load weight begin', flush=True)\ngate =")
    install_stand_in(
        tmp_path,
        monkeypatch,
        code.replace("http.server.HTTPServer((", "print('Capture graph begin', flush=True)\nhttp.server.HTTPServer(("),
    )
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    gate, logs = tmp_path / "sglang" / "gate", [tmp_path / f"log-{number}" for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        starting = []
        try:
            for log, gpus in zip(logs, (["0", "1"], ["1"], ["2"]), strict=True):
                starting.append(pool.submit(launch_sglang, tmp_path, log=log, gpus=gpus, timeout_s=30))
                if log != logs[1]:
                    wait_until(lambda log=log: log.exists() and "Load weight begin" in log.read_text())
            assert not logs[1].exists()
        finally:
            gate.touch()
        engines = [start.result() for start in starting]
    for engine in engines:
        engine.stop()


def test_a_start_that_waits_for_a_gpu_has_a_limit_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU, of which the name is that of an older driver's partition, is locked by the test. Null unsets an option."""
    install_stand_in(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = {"max_total_tokens": None, "nnodes": None}
    start = partial(launch_sglang, tmp_path, log=tmp_path / "log", gpus=["MIG-GPU-8/1/0"], options=options)
    (tmp_path / "agentrl").mkdir()
    with (tmp_path / "agentrl" / "gpu-MIG-GPU-8-1-0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        async def start_and_cancel() -> bool:
            starting = asyncio.create_task(launch(partial(start, timeout_s=600), "engine-0"))
            await asyncio.sleep(0)
            starting.cancel()
            ended, _ = await asyncio.wait({starting}, timeout=20)
            fcntl.flock(lock, fcntl.LOCK_UN)
            await asyncio.wait({starting})
            return bool(ended)

        assert asyncio.run(start_and_cancel())
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EngineError, match=r"for 0\.1 s .* on GPU MIG-GPU-8/1/0 .*sampler\.start_timeout_s"):
            start(timeout_s=0.1)
    assert not (tmp_path / "log").exists()


def test_options_become_flags() -> None:
    options = {"mem_fraction_static": 0.5, "enable_memory_saver": True, "no": False, "none": None, "several": [1, 2]}
    assert command_flags(options) == ["--mem-fraction-static", "0.5", "--enable-memory-saver", "--several", "1", "2"]


@pytest.mark.parametrize(
    "name", ["port", "host", "model_path", "model", "base_gpu_id", "gpu-id-step", "node_rank", "dist-init-addr"]
)
def test_options_that_the_run_itself_sets_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"sampler\.sglang\.{name}=x: .*(sampler\.port|sampler\.url|model\.path|CUDA_VISIBLE|sglang\.nnodes)",
    ):
        launch_sglang(tmp_path, log=tmp_path / "log", options={name: "x"})


DYING = """
import os, signal, sys, time
print(CODE)
sys.stdout.flush()
END
"""
GPU = (
    "[12:00:01] Load weight begin. avail mem=78.42 GB\\n[12:00:09] Load weight end. elapsed=8 s, mem usage=15.0 GB.\\n"
    "[12:00:10] Memory pool end. avail mem=1.2 GB\\n[12:00:11] Capture cuda graph begin. This can take minutes.\\n"
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.25 GiB is free. Including non-PyTorch memory, this process has 77.85 GiB memory in use. Of the allocated "
    "memory 76.10 GiB is allocated by PyTorch, and 1.00 GiB is reserved."
)


@pytest.mark.parametrize(
    ("log", "end", "words"),
    [
        (GPU.split("[12:00:09]")[0] + OOM, "sys.exit(1)", r"loading weights \(exit status 1\): the GPU .*2\.32 GiB.*peak was "
         r"77\.85 GiB.*tp_size"),
        (GPU.split("[12:00:11]")[0] + OOM, "sys.exit(1)", r"making the KV cache .*79\.11 GiB.*sglang\.mem_fraction_static"),
        (GPU + OOM, "os.kill(os.getpid(), 9)", r"capturing CUDA graphs \(signal SIGKILL\): .*sglang\.cuda_graph_max_bs"),
        (GPU.split("[12:00:11]")[0] + "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
         "Current value: mem_fraction_static=0.1", "sys.exit(1)", r"mem_fraction_static was 0\.1.*raise sampler\.sglang\.mem_f"),
        (GPU.split("[12:00:09]")[0], "time.sleep(1); os.kill(os.getpid(), 9)",
         r"SIGKILL.*host out of memory.*loading weights; its measured peak was 0\.\d GiB"),
        ("Rank 0 scheduler died during initialization (exit code: -9).", "sys.exit(1)", "ran out of host memory"),
        ("Traceback (most recent call last):\\nModuleNotFoundError: No module named 'kernels'\\nTraceback\\nbye",
         "sys.exit(3)", r"importing its modules \(exit status 3\): ModuleNotFoundError: No module named 'kernels'\. The end"),
    ],
)  # fmt: skip
def test_a_start_that_fails_names_phase_peak_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, end: str, words: str
) -> None:
    install_stand_in(tmp_path, monkeypatch, DYING.replace("CODE", f'"{log}"').replace("END", end))
    (tmp_path / "log").write_text("CUDA out of memory. That was the start before.\n")
    with pytest.raises(EngineError, match=rf"(?s){words}") as caught:
        launch_sglang(tmp_path, log=tmp_path / "log", timeout_s=30)
    assert "start before" not in str(caught.value)


STRICT = """
import argparse
parser = argparse.ArgumentParser(prog="sglang serve")
for name in ("--model-path", "--random-seed", "--host", "--port"):
    parser.add_argument(name)
parser.add_argument("--attention-backend", choices=["triton", "flashinfer"])
parser.add_argument("--tensor-parallel-size", "--tp-size", type=int)
parser.parse_args()
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mem_fraction_statik": 0.5}, r"sampler\.sglang\.mem_fraction_statik: SGLang refuses it"),
        ({"attention-backend": "tritn"}, r"sampler\.sglang\.attention-backend: .*value .*invalid choice: 'tritn'"),
        ({"tp_size": "many"}, r"sampler\.sglang\.tp_size: .*invalid int value: 'many'"),
    ],
)
def test_an_option_that_sglang_refuses_is_named_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    install_stand_in(tmp_path, monkeypatch, STRICT)
    with pytest.raises(ConfigError, match=words):
        launch_sglang(tmp_path, log=tmp_path / "log", options=options, timeout_s=30)


def test_a_start_that_takes_too_long_is_ended_and_reports_its_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code = f'import os, time\nprint("{GPU}", os.getpid(), flush=True)\ntime.sleep(60)'
    install_stand_in(tmp_path, monkeypatch, code)
    monkeypatch.setattr("agentrl.inference.launch.processes._LONG_S", 0.5)
    with pytest.raises(EngineError, match=r"after 3 s, capturing CUDA graphs; raise sampler\.start_timeout_s"):
        launch_sglang(tmp_path, log=tmp_path / "log", timeout_s=3)
    assert "SGLang is not healthy after 1 s: capturing CUDA graphs" in caplog.text
    wait_for_exit(int((tmp_path / "log").read_text().split()[-1]), 20)


FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("FAMILY", os.getpid(), child.pid, flush=True)
time.sleep(60)
"""
PARENT = """
import pathlib, sys
from agentrl.inference.launch.processes import launch_sglang
launch_sglang(pathlib.Path(sys.argv[1]), log=pathlib.Path(sys.argv[1]) / "log", timeout_s=60)
"""


def test_the_whole_group_ends_when_its_parent_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in knows nothing of agentrl, and its child nothing of its parent."""
    install_stand_in(tmp_path, monkeypatch, FAMILY)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    try:
        wait_until(lambda: (tmp_path / "log").exists() and "FAMILY" in (tmp_path / "log").read_text())
        pids = [int(word) for word in (tmp_path / "log").read_text().split()[1:3]]
        assert os.getpgid(pids[1]) == pids[0], "the server keeps the process id that leads the group"
    finally:
        parent.kill()
        parent.wait()
    for pid in pids:
        wait_for_exit(pid, 20)


def test_a_cpu_gets_default_options_that_the_user_can_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\nsys.exit(1)"
    install_stand_in(tmp_path, monkeypatch, code)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("cuda = None\n")
    with pytest.raises(EngineError):
        launch_sglang(tmp_path, log=tmp_path / "log", options={"device": "cpu", "max-total-tokens": 99}, timeout_s=30)
    arguments, env = json.loads((tmp_path / "log").read_text())
    assert [arguments[arguments.index(name) + 1] for name in ("--attention-backend", "--max-total-tokens")] == [
        "torch_native", "99",
    ]  # fmt: skip
    assert arguments.count("--max-total-tokens") == 1
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    shim, python_path = env["PYTHONPATH"].split(os.pathsep)
    assert (Path(shim) / "sitecustomize.py").exists()
    assert python_path == str(tmp_path)
    (tmp_path / "torch" / "version.py").write_text("cuda = '13.0'\n")
    (tmp_path / "log").unlink()
    with pytest.raises(EngineError):
        launch_sglang(tmp_path, log=tmp_path / "log", options={"device": "cpu"}, timeout_s=30)
    arguments, env = json.loads((tmp_path / "log").read_text())
    assert "--attention-backend" not in arguments
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert env["PYTHONPATH"] == str(tmp_path), "a torch for GPUs needs no stand-ins"
    (tmp_path / "log").unlink()
    with pytest.raises(EngineError):
        launch_sglang(tmp_path, log=tmp_path / "log", host="127.0.0.2", gpus=["5", "3"], timeout_s=30)
    arguments, env = json.loads((tmp_path / "log").read_text())
    assert arguments[arguments.index("--host") + 1] == "127.0.0.2"
    assert env["CUDA_VISIBLE_DEVICES"] == "5,3", "in the order of its ranks"


@pytest.mark.parametrize(
    ("engines", "gpus_each", "gpus", "actual"),
    [
        (3, 1, "0123", ["3", "2", "1"]),
        (2, 2, "01234", ["34", "12"]),
        (1, 4, "4567", ["4567"]),
        (3, 1, "0", ["0", "0", "0"]),
        (3, 2, "abcde", ["de", "bc", "de"]),
    ],
)
def test_engines_get_gpus_of_their_own_from_the_last_on(
    engines: int, gpus_each: int, gpus: str, actual: list[str]
) -> None:
    """The learner has the first; where engines outnumber GPUs, they share."""
    assert ["".join(engine_gpus(number * gpus_each, gpus_each, gpus)) for number in range(engines)] == actual


def test_an_engine_that_needs_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 4 GPUs \(sampler\.sglang\.tp_size.* has 2"):
        engine_gpus(0, 4, ["0", "1"])


@pytest.mark.parametrize(
    ("described", "options", "dtype"),
    [
        ({"dtype": "bfloat16"}, {}, "bfloat16"),
        ({"torch_dtype": "float16"}, {}, "float16"),
        ({"text_config": {"dtype": "float16"}}, {}, "float16"),
        ({"dtype": "float32"}, {}, "bfloat16"),
        ({}, {}, "bfloat16"),
        ({"dtype": "float32"}, {"dtype": "auto"}, "auto"),
        ({"dtype": "float32"}, {"device": "cpu"}, None),
    ],
)
def test_sglang_on_a_gpu_never_holds_a_float32_model_in_float16(
    tmp_path: Path, described: dict[str, object], options: dict[str, object], dtype: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    spec = EngineSpec(SamplerConfig(backend="sglang", sglang=options), tmp_path, tmp_path, 0)
    assert spec.sglang_options().get("dtype") == dtype


def test_sglang_reads_other_entries_than_the_folders_and_starts_with_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    overrides = {"quantization_config": {"quant_method": "fp8"}}
    options = {"json-model-override-args": '{"max_position_embeddings": 99}'}
    spec = EngineSpec(SamplerConfig(backend="sglang", sglang=options), tmp_path, tmp_path, 0, overrides=overrides)
    actual = spec.sglang_options()
    assert json.loads(actual.pop("json_model_override_args")) == {"max_position_embeddings": 99} | overrides
    assert actual == {"dtype": "bfloat16", "load_format": "dummy"}
