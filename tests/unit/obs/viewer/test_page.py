import base64
import hashlib
import json
import re

import pytest

from agentrl.core.types import Failure, FailureKind, FinishReason, Turn
from agentrl.obs.viewer.page import SCRIPTS, build_page, curve_data, describe_run
from agentrl.obs.viewer.page_data import Index, differences
from agentrl.obs.viewer.run_files import Entry, RunFiles

HOSTILE = "</script><script>hacked()</script><!--<img src=x onerror=hacked()>\u2028]]>&lt;"


def texts(ids):
    return [HOSTILE if token == 7 else b"\xe2\x98" if token == 9 else f"t{token}" for token in ids]


def part(page, name):
    match = re.search(rf'<script type="[^"]*" id="{name}">(.*?)</script>', page.html.decode(), re.DOTALL)
    assert match
    return match[1]


@pytest.fixture
def page(make_rollout, pieces):
    rollout = make_rollout(
        pieces,
        HOSTILE,
        HOSTILE,
        prompt=HOSTILE,
        turns=[Turn(HOSTILE, HOSTILE, FinishReason.STOP)],
        failure=Failure(FailureKind.TOOL, HOSTILE, HOSTILE),
        metrics={HOSTILE: 1.0},
        metadata={HOSTILE: HOSTILE},
        label=HOSTILE,
    )
    entries = [Entry(3, rollout, 0.25), Entry(3, make_rollout([], 2), None)]
    return build_page(entries, title=HOSTILE, decode=texts, about={"model": HOSTILE}, notes=[HOSTILE])


def test_nothing_hostile_stands_in_the_page(page):
    html = page.html.decode()
    assert "hacked()</script>" not in html
    assert "<img" not in html
    assert not {"<", "&", "\u2028"} & set(part(page, "index") + part(page, "vocabulary"))
    assert len(re.findall(r"<script", html)) == 5
    assert len(re.findall(r"</script", html)) == 5


def test_an_image_of_several_rollouts_is_in_the_page_once(make_rollout, pieces, picture):
    rollouts = [make_rollout(pieces, number, images={picture.digest: picture}) for number in range(3)]
    page = build_page([Entry(3, rollout, None) for rollout in rollouts], title="t", decode=texts)
    assert json.loads(part(page, "images")) == {picture.digest: picture.data_url}
    assert page.html.count(picture.data_url.partition(",")[2][:40].encode()) == 1
    assert b"img-src data:" in page.html


def test_hostile_text_is_all_there_as_data(page):
    index = json.loads(part(page, "index"))
    assert index["title"] == HOSTILE
    assert index["groups"][0]["prompt"] == HOSTILE
    assert index["rollouts"]["id"] == [f"r{HOSTILE}", "r2"]
    vocabulary = json.loads(part(page, "vocabulary"))
    assert vocabulary["texts"][vocabulary["ids"].index(7)] == HOSTILE
    assert vocabulary["texts"][vocabulary["ids"].index(9)] == [0xE2, 0x98]


def test_the_policy_allows_the_page_s_own_script_and_style_alone(page):
    html = page.html.decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy
    assert policy[1].startswith("default-src 'none'; ")
    for tag in ("script", "style"):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert body
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]


def test_the_page_asks_for_nothing_and_parses_nothing_as_html(page):
    html = page.html.decode()
    assert not re.search(r"""(?:src|href)=["']|url\(|@import|fetch\(|XMLHttpRequest""", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", html)
    assert all(name in {"data.js", "app.js"} or name.endswith(".js") for name in SCRIPTS)


def test_packed_rollouts_lie_one_after_another(page):
    blobs, lengths = part(page, "blobs"), json.loads(part(page, "index"))["rollouts"]["packed"]
    assert len(blobs) == sum(lengths)
    assert all(base64.b64decode(blobs[sum(lengths[:n]) : sum(lengths[: n + 1])], validate=True) for n in range(2))


def test_without_a_tokenizer_the_page_shows_the_reason(make_rollout, pieces):
    page = build_page([Entry(1, make_rollout(pieces))], title="t", decode="no tokenizer at all")
    vocabulary = json.loads(part(page, "vocabulary"))
    assert vocabulary["texts"] is None
    assert vocabulary["why"] == "no tokenizer at all"
    assert sorted(vocabulary["ids"]) == [1, 5, 7, 9, 70_000]


def test_index_columns(make_rollout, pieces):
    index = Index()
    index.add(Entry(1, make_rollout(pieces, 0, metrics={"a": 1.0}), 0.5), 10)
    index.add(Entry(1, make_rollout(pieces, 1, metrics={"b": 2.0}, reward=float("nan"))), 20)
    index.add(Entry(2, make_rollout(pieces, 2)), 30)
    data = index.data()
    assert data["metrics"] == {"a": [1.0, None, None], "b": [None, 2.0, None]}
    assert data["rollouts"]["group"] == [0, 0, 1]
    assert [group["step"] for group in data["groups"]] == [1, 2]
    assert data["rollouts"]["bar"][0] == [0, 2, 1, 3, 0, 1, 1, 1]
    assert data["rollouts"]["logprob"][0] == pytest.approx(-(3 + 4 + 5 + 7) / 8 / 4)


def test_what_tells_prompts_apart():
    prompts = [
        f"Answer the question. Question: What is {subject}?\nassistant\n"
        for subject in ("the age of A", "the town of B")
    ]
    assert differences(prompts) == ["age of A?", "town of B?"]
    assert differences(["same words", "same words"]) == ["same words", "same words"]
    assert differences(["a", "a b"]) == ["a", "a b"]
    assert differences([]) == []


def test_curves_of_long_runs_are_thinned_but_for_evaluations():
    rows = [{"step": n, "train/reward": 0.5} for n in range(9001)]
    rows[4001]["eval/reward"] = 1.0
    data, notes = curve_data(rows)
    assert len(data["steps"]) < 2000
    assert 4001 in data["steps"]
    assert notes == ["The curves show every 5th step of 9,001, and all evaluations."]
    assert curve_data(rows[:3])[1] == []


def test_run_is_described_from_its_configuration(tmp_path):
    config = {
        "env": {"name": "search_r1"},
        "run": {"seed": 0},
        "model": {"path": "tiny"},
        "algo": None,
        "tasks": "mine",
    }
    assert describe_run(RunFiles(tmp_path, tmp_path, {}, config)) == {
        "environment": "search_r1",
        "model": "tiny",
        "seed": "0",
    }
