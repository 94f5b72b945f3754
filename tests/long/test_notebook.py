"""Runs in the kernel of a notebook: a function of a cell as the reward, and the kernel's interrupt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from agentrl import Run
from agentrl.obs.metrics import read_metrics

manager = pytest.importorskip("jupyter_client.manager", reason="ipykernel and nbclient are not installed")
pytestmark = pytest.mark.long

CELL = """
import signal, psutil, agentrl

def score(sample):
    return float(len(sample.response) % 2)

settings = {
    "train.steps": 500, "train.eval_first": False, "train.eval_every": 0, "eval.size": 2, "rollout.batch_size": 2,
    "rollout.n_samples_per_prompt": 2, "rollout.max_turns": 2, "obs.tensorboard": False, "learner.threads": 1,
    "sampler.embedded.threads": 1, "run.dir": "run",
}
run = agentrl.train(settings, env="search_r1", reward=score)
"""
CHECK = """
assert psutil.Process().children(recursive=True) == []
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def reply(client: Any, message: str) -> dict[str, Any]:
    """Return the kernel's reply to a cell that was sent as ``message``."""
    while True:
        received = client.get_shell_msg(timeout=300)
        if received["parent_header"]["msg_id"] == message:
            return dict(received["content"])


def test_the_interrupt_of_a_kernel_ends_a_run_that_is_saved(tmp_path: Path) -> None:
    kernel, client = manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        cell = client.execute(CELL)
        end = time.monotonic() + 300
        while len(read_metrics(tmp_path / "run" / "metrics.jsonl")) < 2:
            assert time.monotonic() < end
            assert kernel.is_alive()
            time.sleep(0.1)
        kernel.interrupt_kernel()
        content = reply(client, cell)
        assert (content["status"], content["ename"]) == ("error", "RunStopped"), content
        content = reply(client, client.execute(CHECK))
        assert content["status"] == "ok", content
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    run = Run(tmp_path / "run")
    [checkpoint] = run.checkpoints
    assert checkpoint.step == run.rows()[-1]["step"] >= 2
    assert str(run.error).startswith("RunStopped: interrupted by SIGINT")
