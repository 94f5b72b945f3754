"""`agentrl eval --url`: a model that is known only by its address scores as the same policy does directly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_policy import serve_policy
from shared_runs import Services, here

from agentrl.config.schema import Config
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.models.resolve import resolve_model
from agentrl.obs.rollouts import read_rollouts
from agentrl.runtime.episodes import open_renderer

ENV = '''
import zlib

from agentrl import Env, Message


class Talk(Env):
    """Three turns; the reward depends on every word of them. Endpoints return all reasoning of a turn before its text."""

    def reset(self, *, seed=None, options=None):
        self.said = []
        return super().reset(seed=seed, options=options)

    def step(self, action):
        words = action.content.replace("<think>", " ").replace("</think>", " ").split()
        self.said.append(" ".join(sorted(words)))
        over = len(self.said) == 3
        score = zlib.crc32("|".join(self.said).encode()) % 1000 / 1000
        return (Message("user", f"And the employer of the {len(self.said)}th author?"),), score * over, over, False, {}
'''


@pytest.fixture(scope="module")
def served(services: Services) -> Iterator[tuple[str, str, str]]:
    engine = services.engine()
    renderer, _ = open_renderer(Config(), resolve_model("multihop-warm"))
    with serve_policy(renderer, lambda: SGLangClient(engine, timeout_s=60), 1024) as (url, key):
        yield engine, url, key


@pytest.mark.long
def test_the_shipped_policy_scores_the_same_by_its_address_as_directly(
    served: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, url, key = served
    (tmp_path / "talk.py").write_text(ENV)
    monkeypatch.setenv("POLICY_KEY", key)
    words = [
        "eval", "--env", "talk.py:Talk", "tasks.name=multihop", "eval.size=6", "eval.temperature=0", "eval.split=validation",
        "sampler.max_new_tokens=24", "rollout.max_tokens=512", "rollout.concurrency=1",  # the last four are left
    ]  # fmt: skip
    direct = here(*words, f"sampler.url={engine}", "--json", "a.json", "--rollouts", "a.jsonl", cwd=tmp_path)
    assert direct.returncode == 0, direct.stdout + direct.stderr
    address = ["--url", url, "--model", "policy", "--api-key-env", "POLICY_KEY"]
    remote = here(*words, *address, "--json", "b.json", "--rollouts", "b.jsonl", cwd=tmp_path)
    assert remote.returncode == 0, remote.stdout + remote.stderr
    rollouts = {name: {r.rollout_id: r for r in read_rollouts(tmp_path / f"{name}.jsonl")} for name in "ab"}
    assert len(rollouts["a"]) == 6
    for name, rollout in rollouts["a"].items():
        other = rollouts["b"][name]
        assert (rollout.reward, rollout.sampled_tokens) == (other.reward, other.sampled_tokens)
        assert [turn.observation for turn in rollout.turns] == [turn.observation for turn in other.turns]
    results = [json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab"]
    assert results[0]["eval/reward"] > 0
    names = [name for name in results[0] if name.startswith("eval/")]
    assert {name: results[1][name] for name in names} == {name: results[0][name] for name in names}
    assert results[1]["eval/endpoint/requests"] == 6 * 3 + 1
    assert results[1]["eval/endpoint/completion_tokens"] == sum(r.sampled_tokens for r in rollouts["a"].values())

    # An evaluation that was killed as it wrote its third rollout goes on with the other four episodes, to the same means.
    lines = (tmp_path / "b.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])
    resume = [*words, *address, "--rollouts", "b.jsonl", "--resume"]
    refused = here(*resume, "rollout.max_turns=2", cwd=tmp_path)
    assert refused.returncode == 2
    assert "rollout.max_turns: 8 → 2" in refused.stderr, refused.stderr
    resumed = here(*resume, "--json", "c.json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resuming: 2 of 6 episodes are in b.jsonl" in resumed.stdout
    results.append(json.loads((tmp_path / "c.json").read_text()))
    assert {name: results[2][name] for name in names} == {name: results[1][name] for name in names}
    assert results[2]["eval/endpoint/requests"] == 4 * 3 + 1
    assert results[2]["sets"] == results[1]["sets"]
    assert {r.rollout_id: r.reward for r in read_rollouts(tmp_path / "b.jsonl")} == {
        name: rollout.reward for name, rollout in rollouts["b"].items()
    }
