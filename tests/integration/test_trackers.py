"""Weights & Biases, real and offline, through the command line: a resumed run goes on as the same one."""

from pathlib import Path

import numpy as np
import pytest
from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, Running, agentrl, metrics

from agentrl.core.types import FinishReason, MaskReason, Provenance, Rollout, Row, RowKey, StopReason, Turn
from agentrl.models.load import load_tokenizer
from agentrl.models.resolve import resolve_model
from agentrl.obs.rollouts import RolloutFile

PROMPT, ANSWER = "Question: Who?", "<answer> me </answer>"


def write_samples(path: Path, tasks: int) -> None:
    """Rollouts as the shipped policy could have sampled them, two a task."""
    tokenizer = load_tokenizer(resolve_model("multihop-warm"))
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, ANSWER))
    file = RolloutFile(path)
    for number in range(2 * tasks):
        task, sample = f"t{number // 2}", number % 2
        sampled = np.arange(len(prompt) + len(answer)) >= len(prompt)
        row = Row(
            key=RowKey(task, f"{task}/{sample}"),
            token_ids=np.array(prompt + answer, np.int32),
            provenance=np.where(sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
            mask=sampled.astype(np.uint8),
            mask_reason=np.where(sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
            logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            requests=np.where(sampled, 0, -1).astype(np.int32),
            request_ids=("request",),
        )
        turns = [Turn(ANSWER, "", FinishReason.STOP)]
        prompt_text = tokenizer.decode(prompt)
        file.write(
            Rollout(
                task, row.key.rollout_id, [row], float(sample), StopReason.TERMINATED, turns=turns, prompt=prompt_text
            )
        )
    file.finish()


def wandb_runs(run: Path) -> list[str]:
    """The ids under which the run was started, in order."""
    return [path.name.rsplit("-", 1)[1] for path in sorted((run / "wandb").glob("offline-run-*"))]


@pytest.mark.long
def test_a_resumed_run_is_the_same_run_at_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    write_samples(tmp_path / "samples.jsonl", 40)
    words = ["train", *ONE_THREAD, "--replay", "samples.jsonl", "run.dir=run", "rollout.batch_size=1", "train.steps=40"]
    words += ["rollout.n_samples_per_prompt=2", "obs.wandb=offline", "obs.progress=plain", "train.save_every=0"]
    run = Running(*words, cwd=tmp_path, target=IN_PROCESS_LEARNER)
    try:
        run.wait_for(lambda: len(metrics(tmp_path / "run")) >= 2)
        run.interrupt()  # W&B's own process ends too
    finally:
        run.end()
    done = len(metrics(tmp_path / "run"))
    [first] = wandb_runs(tmp_path / "run")
    assert "wandb" in run_output(tmp_path)
    again = agentrl(*words, f"train.steps={done + 1}", "--resume", cwd=tmp_path, target=IN_PROCESS_LEARNER)
    assert again.returncode == 0, again.stdout + again.stderr
    assert wandb_runs(tmp_path / "run") == [first, first]
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, done + 2))
    newest = max((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert b"train/reward" in next(newest.glob("*.wandb")).read_bytes()
    assert list(newest.glob("files/media/table/samples*.json")), "the sample table"


def run_output(folder: Path) -> str:
    return (folder / "output.txt").read_text()
