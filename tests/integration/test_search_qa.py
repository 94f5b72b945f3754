"""Published rows and a corpus, written here in the published formats, through the command line with the shipped policy."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from shared_runs import Services, here, metrics

from agentrl.core.registry import make_env, make_tasks

WORLD = make_tasks("multihop", {"scale": 0.2})
"""Questions that the shipped policy can answer, when it is given their documents."""
SEARCH_QA = ["tasks.name=search_qa", "tools.search.options.corpus=wiki-18.jsonl.gz", "obs.progress=plain"]


def rows(count: int, split: str) -> list[dict[str, Any]]:
    prompt = make_env("search_r1").prompt
    return [
        {
            "id": f"{split}_{index}",
            "question": task.question,
            "golden_answers": task.answer,
            "data_source": ("nq", "hotpotqa")[index % 2],
            "prompt": [{"role": "user", "content": prompt.replace("{question}", task.question)}],
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": task.answer}, "style": "rule"},
            "extra_info": {"index": index, "split": split},
        }
        for index, task in enumerate(WORLD.split("eval")[:count])
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows(24, "train")), tmp_path / "train.parquet")
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows(24, "test")))
    corpus = "\n".join(json.dumps(row) for row in WORLD.corpora()["heldout"])
    (tmp_path / "wiki-18.jsonl.gz").write_bytes(gzip.compress(corpus.encode()))
    return tmp_path


@pytest.mark.long
def test_training_on_published_rows(folder: Path, services: Services) -> None:
    done = services.agentrl(
        *("train", "--env", "search_r1", *SEARCH_QA, "run.dir=run"),
        *(
            "tasks.options.train=train.parquet",
            "tasks.options.eval=[test.jsonl]",
            "eval.group_by=data_source",
            "eval.size=24",
        ),
        *(
            "train.steps=1",
            "rollout.batch_size=8",
            "rollout.n_samples_per_prompt=4",
            "train.eval_first=false",
            "obs.tensorboard=false",
        ),
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, float] = {}
    for row in metrics(folder / "run"):
        figures |= row
    assert figures["rollout/searches"] > 0
    assert figures["rollout/episodes"] == 32
    sources = [figures[f"eval/exact_match/data_source={source}"] for source in ("nq", "hotpotqa")]
    assert sum(sources) / 2 == pytest.approx(figures["eval/exact_match"])
    assert figures["eval/exact_match"] > 0, "some of the answers are in the corpus, and are found"
    [line, *_] = (folder / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt_id"].startswith("search_qa/train/")


def test_bad_rows_and_missing_files_are_the_users_to_mend(folder: Path) -> None:
    good, bad = rows(2, "test")
    bad |= {"golden_answers": None, "reward_model": None}
    (folder / "test.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad))
    train = ["train", "--env", "search_r1", *SEARCH_QA, "eval.size=2", "eval.group_by=data_source"]
    files = ["tasks.options.train=train.parquet", "tasks.options.eval=test.jsonl"]
    done = here(*train, *files, cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert (
        "test.jsonl, line 2 has neither 'reward_model.ground_truth.target' nor 'golden_answers'; it has: id"
        in done.stderr
    )
    done = here(*train, *files, "tasks.options.eval=a.jsonl", "tools.search.options.corpus=b.jsonl", cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "tasks.options.eval=a.jsonl: there is no such file" in done.stderr
    assert "tools.search.options.corpus: there is no file b.jsonl" in done.stderr
    assert not (folder / "runs").exists(), "nothing was started"


def test_a_bad_document_names_its_line(folder: Path) -> None:
    corpus = gzip.decompress((folder / "wiki-18.jsonl.gz").read_bytes()).splitlines()
    corpus[6] = b'{"id": "6", "title": "x", "text": "y"}'
    (folder / "wiki-18.jsonl.gz").write_bytes(gzip.compress(b"\n".join(corpus)))
    done = here("tools", "serve", "search", "--corpus", "wiki-18.jsonl.gz", "--port", "0", cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "wiki-18.jsonl.gz, line 7 has no 'contents'; it has: 'id', 'title', 'text'" in done.stderr
