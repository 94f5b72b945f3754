"""`agentrl eval` on several sets at once, as a user types it: a split with samples, a greedy one, a file of prompts."""

import json
from pathlib import Path

import pytest
from agentrl_tasks.multihop import Multihop
from shared_runs import Services

from agentrl.obs.rollouts import read_rollouts

DATA = ["data.input_key=question", "data.label_key=golden_answers", "data.metadata_key=about", "data.id_key=id"]
SETS = [
    "eval.n_samples=2",
    "eval.sets.sampled={size: 12}",
    "eval.sets.greedy={split: validation, size: 6, n_samples: 1, temperature: 0}",
    "eval.sets.file={path: questions.jsonl, max_new_tokens: 24, group_by: hops}",
]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, services: Services) -> tuple[Path, str]:
    cwd = tmp_path_factory.mktemp("evaluated")
    tasks = list(Multihop().split("validation")[:5])
    rows = [
        {"id": f"q{number}", "question": task.question, "golden_answers": task.answer, "about": dict(task.metadata)}
        for number, task in enumerate(tasks)
    ]
    (cwd / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--json", "eval.json", "--rollouts", "samples.jsonl"]
    done = services.agentrl("eval", "--env", "search_r1", *SETS, *DATA, *files, cwd=cwd, search=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd, done.stdout


def test_each_set_has_its_own_prompts_samples_and_decoding(evaluated: tuple[Path, str]) -> None:
    sets = json.loads((evaluated[0] / "eval.json").read_text())["sets"]
    assert list(sets) == ["sampled", "greedy", "file"]
    assert [(eval_set["prompts"], eval_set["episodes"]) for eval_set in sets.values()] == [(12, 24), (6, 6), (5, 10)]
    assert [eval_set["sampling"]["temperature"] for eval_set in sets.values()] == [1.0, 0.0, 1.0]
    assert [sorted(key for key in eval_set["means"] if "@" in key) for eval_set in sets.values()] == [
        ["pass@1", "pass@2"], ["pass@1"], ["pass@1", "pass@2"],
    ]  # fmt: skip
    for eval_set in sets.values():
        assert eval_set["failed"] == 0
        mean = eval_set["means"]["exact_match"]
        assert mean["low"] <= mean["value"] <= mean["high"]
        assert mean["ci95"] == max(mean["value"] - mean["low"], mean["high"] - mean["value"])
        assert sum(eval_set["stops"].values()) == pytest.approx(1.0)
    assert sets["file"]["source"] == "questions.jsonl"
    assert set(sets["sampled"]["by"]) == {"hops=1", "hops=2", "hops=3"}
    passes = sets["sampled"]["means"]
    assert passes["pass@1"]["value"] <= passes["pass@2"]["value"]


def test_flat_keys_agree_with_the_nested_ones(evaluated: tuple[Path, str]) -> None:
    data = json.loads((evaluated[0] / "eval.json").read_text())
    for name, eval_set in data["sets"].items():
        assert data[f"eval/{name}/exact_match"] == eval_set["means"]["exact_match"]["value"]
        assert data[f"eval/{name}/pass@1/ci95"] == eval_set["means"]["pass@1"]["ci95"]
    assert "eval/exact_match" not in data
    assert data["eval/sampled/exact_match/hops=1"] > 0, "the shipped policy answers most questions of one hop"


def test_the_samples_are_those_the_figures_are_of(evaluated: tuple[Path, str]) -> None:
    cwd, _ = evaluated
    data = json.loads((cwd / "eval.json").read_text())
    rollouts = read_rollouts(cwd / "samples.jsonl")
    assert len(rollouts) == 40
    assert len({rollout.rollout_id for rollout in rollouts}) == 40
    for name in data["sets"]:
        rewards = [rollout.reward for rollout in rollouts if rollout.rollout_id.startswith(f"eval/{name}/")]
        assert sum(rewards) / len(rewards) == pytest.approx(data[f"eval/{name}/reward"])
    assert {rollout.prompt_id for rollout in rollouts if "/file/" in rollout.rollout_id} == {f"q{n}" for n in range(5)}
    assert all(rollout.rows for rollout in rollouts)


def test_the_table_shows_the_sets_side_by_side(evaluated: tuple[Path, str]) -> None:
    _, output = evaluated
    assert "evaluating: 40 episodes" in output
    [head] = [line for line in output.splitlines() if "metric" in line]
    assert all(name in head for name in ("sampled", "greedy", "file"))
    [row] = [line for line in output.splitlines() if "exact_match" in line]
    assert row.count("±") + row.count("[") == 3
    assert "greedy" in output
    assert "12 x 2" in output
    assert "questions.jsonl" in output
