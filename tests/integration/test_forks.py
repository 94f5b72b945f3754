"""A chat template that leaves earlier reasoning out, from the command line: rows fork, train, and pass the audit."""

from pathlib import Path

import pytest
from shared_runs import Services, here, metrics

from agentrl.core.types import ForkReason, MaskReason, Provenance
from agentrl.obs.rollouts import read_rollouts, rollout_files

ENV = '''
from agentrl import Env, Message, Task


class Insists(Env):
    """Asks three times."""

    stop = ("</search>", "</answer>")

    def reset(self, *, seed=None, options=None):
        self.left = 3
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.left -= 1
        new = () if self.left == 0 else (Message("user", "Say it again."),)
        return new, len(action.content) / 100, self.left == 0, False, {}

    @classmethod
    def tasks(cls, split, seed):
        return [Task(f"{split}/{n}", (Message("user", f"What is the mayor of Sado{n}?"),)) for n in range(8)]
'''
TEMPLATE = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last -%}{{- m.content.split('</think>')[-1] -}}"
    "{%- else -%}{{- m.content -}}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
RENDER = ["--env", "insists.py:Insists", "render.chat_template=drops.jinja"]
TINY = [
    "learner.precision=float32",  # the sampler computes in float32, and a test compares with it
    "rollout.batch_size=2",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_tokens=640",
    "sampler.max_new_tokens=32",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "insists.py").write_text(ENV)
    (tmp_path / "drops.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.mark.long
def test_rows_that_fork_are_trained_and_pass_the_audit(folder: Path, services: Services) -> None:
    """Every turn but the last that reasoned ends a row, and each sampled token is trained once."""
    steps = ["run.dir=run", "train.steps=2", "train.eval_first=false", "train.eval_every=0", "eval.size=2"]
    done = services.agentrl("train", *RENDER, *TINY, *steps, "obs.progress=plain", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a new row before user messages" in next(line for line in done.stdout.splitlines() if " template " in line)
    rollouts = [rollout for path in rollout_files(folder / "run").values() for rollout in read_rollouts(path)]
    forks = [row for rollout in rollouts for row in rollout.rows if row.key.row]
    assert forks
    assert {row.fork for row in forks} == {ForkReason.THINKING}
    for rollout in rollouts:
        assert sum(int(row.mask.sum()) for row in rollout.rows) == rollout.sampled_tokens
        for row in rollout.rows:
            sampled = row.provenance == Provenance.SAMPLED
            assert ((row.mask == 1) | (row.mask_reason == MaskReason.SHARED))[sampled].all()
    trained = [row for row in metrics(folder / "run") if "train/reward" in row]
    assert [row["train/provenance_faults"] for row in trained] == [0.0, 0.0]
    assert all(row["train/sampler_gap_max"] < 0.5 for row in trained)
    done = here("audit", "run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"thinking {len(forks)}" in " ".join(done.stdout.split()).replace(": ", " ")


def test_reasoning_that_is_kept_stays_one_row(folder: Path, services: Services) -> None:
    done = services.agentrl(
        "rollout", *RENDER, *TINY, "render.keep_thinking=true", "--out", "kept.jsonl", "--tasks", "4", cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = read_rollouts(folder / "kept.jsonl")
    assert {len(rollout.rows) for rollout in rollouts} == {1}
    assert any("</think>" in turn.action for rollout in rollouts for turn in rollout.turns[:-1])
