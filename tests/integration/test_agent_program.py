"""``rollout.agent.command`` through the command line: a program that knows only an endpoint of OpenAI is trained."""

import json
from pathlib import Path

from shared_runs import Services, here, metrics

AGENT = """
import json, os, urllib.request

def ask(*messages):
    body = json.dumps({"model": "policy", "messages": messages, "temperature": 0.1}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

prompt = {"role": "user", "content": os.environ["AGENTRL_PROMPT"]}
first = ask(prompt)
last = ask(prompt, first, {"role": "user", "content": "Go on."})
with open("answer.txt", "w") as file:
    file.write(last["content"])
"""
REWARD = """
from pathlib import Path


def score(sample):
    text = Path(sample.metadata["agent_folder"], "answer.txt").read_text()
    assert text.strip() in sample.final
    return len(text) / 100
"""
OPTIONS = ["data.path=train.jsonl", "reward=reward.py:score", "rollout.agent.command=python agent.py"]


def test_an_agent_program_trains(tmp_path: Path, services: Services) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"What is {number} + 1?"} for number in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = services.agentrl(
        "train", "--env", "single_turn", *OPTIONS, "train.steps=1", "rollout.batch_size=2", "rollout.n_samples_per_prompt=4",
        "sampler.max_new_tokens=12", "rollout.max_turns=2", "run.dir=run", "obs.progress=plain", "obs.tensorboard=false",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sets temperature=0.1, which has no effect" in (done.stdout + done.stderr).replace("\n", " ")
    assert [row["step"] for row in metrics(tmp_path / "run") if "train/reward" in row] == [1]
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert len(rollouts) == 8
    for rollout in rollouts:
        assert rollout["failure"] is None
        assert len(rollout["turns"]) == 2
        (row,) = rollout["rows"]
        assert sum(row["mask"]) == rollout["sampled_tokens"] > 0
        assert not Path(rollout["metadata"]["agent_folder"]).exists()
    audited = here("audit", "run", cwd=tmp_path)
    assert audited.returncode == 0, audited.stdout + audited.stderr


def test_a_program_that_does_not_exist_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    done = here(
        "train", "--env", "single_turn", "data.path=train.jsonl", "reward=exact_match", "data.label_key=prompt",
        "rollout.agent.command=no-such-agent", "run.dir=run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rollout.agent.command=no-such-agent: there is no program no-such-agent" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()
