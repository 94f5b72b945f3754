"""What is sampled by the command line passes the audit; what was changed afterwards does not."""

from pathlib import Path

from shared_runs import Services, here

from agentrl.obs.rollouts import read_rollouts

TINY = ["rollout.batch_size=4", "rollout.n_samples_per_prompt=4"]


def test_samples_pass_and_a_changed_id_is_found(tmp_path: Path, services: Services) -> None:
    words = ["--env", "search_r1", "--out", "samples.jsonl", "--tasks", "4", *TINY]
    done = services.agentrl("rollout", *words, cwd=tmp_path, search=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = here("view", "samples.jsonl", "--limit", "1", cwd=tmp_path).stdout
    assert "<|im_end|>" in seen, "the file next to the samples names the model, and so the tokenizer"
    done = here("audit", "samples.jsonl", cwd=tmp_path)
    out = " ".join(done.stdout.split())
    assert (done.returncode, done.stderr) == (0, ""), out + done.stderr
    rollouts = read_rollouts(tmp_path / "samples.jsonl")
    turns = sum(len(rollout.turns) for rollout in rollouts)
    sampled = sum(rollout.sampled_tokens for rollout in rollouts)
    assert f"rollouts 16 rows 16 tokens {sum(len(rollout.rows[0].token_ids) for rollout in rollouts):,}" in out
    assert f"sampled tokens {sampled:,} trained tokens {sampled:,} forks none" in out
    assert f"of {turns:,} sampled turns" in out
    assert "violations 0" in out
    path = tmp_path / "samples.jsonl"
    full_content = path.read_bytes()
    ids = full_content.index(b'"token_ids":[') + len(b'"token_ids":[')
    path.write_bytes(
        full_content[:ids] + (b"7" if full_content[ids : ids + 1] != b"7" else b"8") + full_content[ids + 1 :]
    )
    done = here("audit", "samples.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert f"samples.jsonl:1, rollout {rollouts[0].rollout_id}, row 0: it is not as it was written" in done.stdout
    assert "2 violations in 1 rollouts of samples.jsonl" in done.stderr, "the checksum, and the text of the prompt"
