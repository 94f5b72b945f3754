"""The data of the dashboard: runs that are whole, being written, or broken."""

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient

from agentrl.core.types import Failure, FailureKind, FinishReason, Rollout, StopReason, Turn
from agentrl.dashboard.app import changed_runs, make_app
from agentrl.dashboard.login import TOKEN_VARIABLE, view_token
from agentrl.dashboard.runs import DashboardRun, Runs, find_runs
from agentrl.obs.rollout_format import encode_rollout
from agentrl.obs.rollouts import RolloutFile, RolloutRecorder
from agentrl.obs.trace import FOLDER as TRACES
from agentrl.self_play.games import Game, WinTable
from agentrl.self_play.ratings import Ratings
from benchmarks.viewer import synthetic_entries

EVIL = "</script><script>window.hacked=1</script>"
HERE = "http://127.0.0.1"
ROLLOUTS = [entry.rollout for entry in synthetic_entries(16, 40)]


def rollout(number: int, **changes: Any) -> Rollout:
    return replace(ROLLOUTS[number], **changes)


def write_run(folder: Path, form: Any = "jsonl") -> None:
    """Two steps of two groups of four; the last has a failure, a cut episode, and hostile texts."""
    recorder = RolloutRecorder(folder / "rollouts", form=form)
    for step in (1, 2):
        rollouts = [
            rollout(n, prompt_id=f"p{n // 4}", reward=n % 4 / 2, turns=[Turn("say", "seen", FinishReason.STOP)])
            for n in range(8)
        ]
        if step == 2:
            lost = Failure(FailureKind.TOOL, "ToolFailure", "search is gone")
            rollouts[1] = replace(rollouts[1], failure=lost, dropped=True, rows=[], stop_reason=StopReason.FAILED)
            rollouts[2] = replace(
                rollouts[2], prompt=EVIL, turns=[Turn(EVIL, "", FinishReason.STOP)], stop_reason=StopReason.MAX_TURNS
            )
            rollouts[3] = replace(rollouts[3], reward=float("nan"))
        recorder.write(step, rollouts)
        recorder.finish(step, {scored.rollout_id: 0.25 for scored in rollouts if scored.failure is None})
    rows = [
        {"step": step, "train/reward": step / 4, "time/step_s": 2.0, "time/rollout_s": 1.5, "engine_idle/tools": 0.1}
        for step in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("env: {name: search_r1}\ntrain: {steps: 9}\n")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "first")
    write_run(root / "deep" / "second", form="records")
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[TestClient]:
    with TestClient(make_app(Runs(root)), base_url=HERE, raise_server_exceptions=True) as client:
        yield client


def get(client: TestClient, name: str, **parameters: Any) -> Any:
    reply = client.get(f"/api/{name}", params=parameters)
    assert reply.status_code == 200, reply.text
    return orjson.loads(reply.content)


def ids(reply: Any) -> list[str]:
    return [row["id"] for row in reply["rows"]]


def test_runs_are_listed_by_their_paths(client: TestClient) -> None:
    reply = get(client, "list_runs")
    assert [run["run"] for run in reply["runs"]] == ["deep/second", "first"]
    first = reply["runs"][1]
    assert (first["state"], first["step"], first["steps"], first["reward"]) == ("unknown", 2, 9, 0.5)
    assert first["about"]["environment"] == "search_r1"


def test_only_runs_under_the_folder_are_read(client: TestClient, root: Path) -> None:
    for name in ("..", "first/../first", str(root / "first"), "", "first/rollouts"):
        assert client.get("/api/metrics", params={"run": name}).status_code == 404, name
    assert client.get("/api/log", params={"run": "first", "name": "../config.yaml"}).status_code == 404
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/viewer/page.html", "/viewer/..%2fpage.py"):
        assert client.get(path).status_code == 404, path


def test_links_and_a_run_s_own_folders_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_000001" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "warm_start").mkdir()
    (tmp_path / "run" / "warm_start" / "metrics.jsonl").touch()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)] == ["run", "run/warm_start"]


@pytest.mark.parametrize("run", ["first", "deep/second"])
def test_rollouts_are_paged_sorted_and_filtered(client: TestClient, run: str) -> None:
    reply = get(client, "rollouts", run=run)
    assert (reply["total"], reply["matching"], reply["complete"]) == (16, 16, True)
    assert [row["step"] for row in reply["rows"]] == [2] * 8 + [1] * 8
    assert ids(reply)[:3] == ["1/0", "1/1", "1/2"]
    assert reply["rows"][0]["tokens"] == 40
    assert reply["rows"][0]["advantage"] == 0.25
    assert reply["rows"][1]["advantage"] is None
    assert reply["rows"][3]["reward"] is None
    page = get(client, "rollouts", run=run, offset=6, limit=4)
    assert [(row["step"], row["id"]) for row in page["rows"]] == [(2, "1/6"), (2, "1/7"), (1, "1/0"), (1, "1/1")]
    rewards = [row["reward"] for row in get(client, "rollouts", run=run, sort="reward", order="ascending")["rows"]]
    assert rewards == [*sorted(reward for reward in rewards if reward is not None), None]
    assert get(client, "rollouts", run=run, status="failed")["matching"] == 1
    assert get(client, "rollouts", run=run, stop="max_turns", steps="2:2")["matching"] == 1
    assert get(client, "rollouts", run=run, rewards="1.5:")["matching"] == 3
    assert get(client, "rollouts", run=run, prompt="p1", steps="1:1")["matching"] == 4
    assert get(client, "rollouts", run=run, kind="eval")["total"] == 0
    assert reply["counts"]["status"] == {"whole": 15, "failed": 1, "dropped": 1, "damaged": 0}


def test_the_search_reads_the_texts(client: TestClient) -> None:
    assert get(client, "rollouts", run="first", words="HACKED=1")["matching"] == 1
    assert get(client, "rollouts", run="first", words="search is gone")["matching"] == 1
    assert get(client, "rollouts", run="first", words="nowhere")["matching"] == 0


def test_groups_have_mean_and_deviation(client: TestClient) -> None:
    reply = get(client, "groups", run="first", sort="deviation", order="ascending")
    assert (reply["matching"], [row["rollouts"] for row in reply["rows"]]) == (4, [4, 4, 4, 4])
    group = next(row for row in reply["rows"] if (row["step"], row["prompt"]) == (1, "p0"))
    assert (group["reward"], round(group["deviation"], 4), group["failed"]) == (0.75, 0.559, 0)


def test_a_group_and_its_tokens(client: TestClient) -> None:
    index = get(client, "group", run="first", step=2, prompt="p0")
    assert index["rollouts"]["id"] == ["1/0", "1/1", "1/2", "1/3"]
    assert index["damaged"] == []
    start, end = index["places"][2]
    content = client.get("/api/tokens", params={"run": "first", "step": 2, "start": start, "end": end}).content
    (size,) = struct.unpack_from("<I", content)
    vocabulary = orjson.loads(content[4 : 4 + size])
    assert vocabulary["texts"] is None
    assert "no checkpoint with a tokenizer" in vocabulary["why"]
    data = zlib.decompress(content[4 + size :])
    (head,) = struct.unpack_from("<I", data)
    assert orjson.loads(data[4 : 4 + head])["rows"][0]["tokens"] == 40
    numbers = struct.unpack_from("<40H", data, 4 + head)
    assert list(numbers) == ROLLOUTS[2].rows[0].token_ids.tolist(), "numbers are the tokenizer's ids"


def test_steps_curves_and_the_comparison(client: TestClient) -> None:
    steps = get(client, "steps", run="first", limit=1)
    assert (steps["first"], steps["last"], [step["step"] for step in steps["steps"]]) == (1, 2, [2])
    assert steps["steps"][0]["phases"] == {"rollout": 1.5}
    assert steps["steps"][0]["engine_idle"] == {"tools": 0.1}
    curves = get(client, "curves", run=["first", "deep/second"], key=["train/reward", "none"])
    assert curves["first"] == {
        "train/reward": {"steps": [1, 2], "values": [0.25, 0.5]},
        "none": {"steps": [], "values": []},
    }
    compared = get(client, "comparison", run="first", other="deep/second")
    assert compared["settings"] == []
    assert {row["prompt"] for row in compared["prompts"]} == {"p0", "p1"}


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    metrics, file = folder / "metrics.jsonl", folder / "rollouts" / "step_000001.jsonl"
    metrics.write_text('{"step": 1, "train/reward": 0.5}\n{"step": 2, "train/rew')
    with TestClient(make_app(runs), base_url=HERE) as client:
        assert get(client, "metrics", run="run") == {"train/reward": 0.5}
        assert get(client, "rollouts", run="run")["total"] == 0
        signatures: dict[str, tuple[object, ...]] = {}
        assert changed_runs([runs.run("run")], signatures) == []
        written = RolloutFile(file)
        written.write(ROLLOUTS[:3])
        assert changed_runs([runs.run("run")], signatures) == ["run"]
        with file.open("ab") as end:
            end.write(b'{"prompt_id": "cut')
        assert get(client, "rollouts", run="run")["total"] == 3
        with file.open("r+b") as end:
            end.truncate(file.stat().st_size - len(b'{"prompt_id": "cut'))
        written.write(ROLLOUTS[3:5])
        with metrics.open("a") as end:
            end.write('ard": 0.75}\n')
        assert changed_runs([runs.run("run")], signatures) == ["run"]
        assert ids(get(client, "rollouts", run="run")) == ["1/0", "1/1", "1/2", "1/3", "1/4"]
        assert get(client, "metrics", run="run") == {"train/reward": 0.75}
        written = RolloutFile(file)  # a resumed run repeats the step
        written.write(ROLLOUTS[8:10])
        assert ids(get(client, "rollouts", run="run")) == ["1/8", "1/9"]
        file.write_bytes(b"".join(encode_rollout(rollout, number) for number, rollout in enumerate(ROLLOUTS[10:16])))
        expected = [f"1/{number}" for number in range(10, 16)]
        assert ids(get(client, "rollouts", run="run")) == expected, "the same inode, and more bytes"


def break_line(path: Path, number: int, change: Callable[[bytes], bytes]) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[number] = change(lines[number])
    path.write_bytes(b"\n".join(lines))


def test_a_broken_run_is_shown_as_far_as_it_can_be(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder)
    break_line(folder / "metrics.jsonl", 0, lambda line: line[:9])
    break_line(folder / "rollouts" / "step_000001.jsonl", 1, lambda line: line[:30])
    break_line(
        folder / "rollouts" / "step_000002.jsonl", 0, lambda line: line.replace(b'"reward":0.0', b'"reward":9.0', 1)
    )
    (folder / "rollouts" / "step_000002.advantages.json").write_text("{")
    (folder / "rollouts" / "step_000003.rollouts").write_bytes(b"no records at all")
    (folder / "config.yaml").write_text("env: [")
    (folder / "end.json").write_text("{")
    (folder / "league.jsonl").write_text("{}\n")
    (folder / "journal").mkdir()
    (folder / "journal" / "log.jsonl").write_text("nothing\n")
    with TestClient(make_app(Runs(tmp_path)), base_url=HERE) as client:
        (run,) = get(client, "list_runs")["runs"]
        assert (run["damaged_lines"], run["step"], run["about"]) == (1, 2, {})
        reply = get(client, "rollouts", run="run")
        assert (reply["total"], reply["counts"]["status"]["damaged"]) == (16, 1)
        assert len(reply["errors"]) == 2
        assert "not a rollout of agentrl" in get(client, "rollouts", run="run", status="damaged")["rows"][0]["excerpt"]
        assert get(client, "group", run="run", step=1, prompt="p0")["rollouts"]["id"] == ["1/0", "1/2", "1/3"]
        assert (
            "advantages" in client.get("/api/group", params={"run": "run", "step": 2, "prompt": "p0"}).json()["error"]
        )
        assert "journal" in get(client, "cluster", run="run")["journal"]["error"]
        assert get(client, "advice", run="run")["error"]
        assert client.get("/api/league", params={"run": "run"}).status_code == 404
        assert client.get("/api/rollouts", params={"run": "run", "steps": "x"}).status_code == 400
        assert client.get("/api/tokens", params={"run": "run", "step": 1, "start": 3, "end": 9}).status_code == 404


def test_a_rollout_that_was_changed_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    break_line(path, 0, lambda line: line.replace(b'"reward":0.0', b'"reward":9.0', 1))
    with TestClient(make_app(Runs(tmp_path)), base_url=HERE) as client:
        assert get(client, "group", run="run", step=1, prompt="p0")["damaged"] == ["1/0"]


def test_the_league_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder)
    ratings, results = Ratings(), WinTable()
    games = [Game("a", ("policy", "random"), (1.0, -1.0)), Game("b", ("random", "policy"), (1.0, -1.0))]
    results.add(games)
    ratings.update(games)
    row = {"step": 1, "ratings": ratings.state(), "results": results.state()}
    (folder / "league.jsonl").write_bytes(orjson.dumps(row) + b"\n")
    with TestClient(make_app(Runs(tmp_path)), base_url=HERE) as client:
        league = get(client, "league", run="run")
        assert get(client, "list_runs")["runs"][0]["has_league"]
    assert {rating["player"] for rating in league["ratings"]} == {"policy", "random"}
    place = [league["players"].index(name) for name in ("policy", "random")]
    assert league["payoff"][place[0]][place[1]] == {"wins": 1, "draws": 0, "losses": 1, "score": 0.5}
    assert league["by_seat"]["0"][place[0]][place[1]]["score"] == 1.0
    assert league["asymmetry"] == {"random": 1.0}


def test_spans_of_a_trace(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder)
    (folder / TRACES).mkdir()
    spans = [{"name": "phase", "ts": 5e6, "pid": 1, "tid": 0, "ph": "X", "dur": 2e6, "args": {"of": "train"}}]
    (folder / TRACES / "step_000002.json").write_bytes(b"[\n" + b",\n".join(map(orjson.dumps, spans)) + b',\n{"cut')
    with TestClient(make_app(Runs(tmp_path)), base_url=HERE) as client:
        assert get(client, "steps", run="run")["steps"][1]["traced"]
        trace = get(client, "trace", run="run", step=2)
        assert (trace["end"], trace["spans"]) == (2.0, [[1, 0, 0.0, 2.0, "phase", "train"]])
        assert "obs.trace=true" in client.get("/api/trace", params={"run": "run", "step": 1}).json()["error"]


def test_the_state_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("process 1 on elsewhere since 2026-11-26 10:00:00\n")
    assert DashboardRun(".", tmp_path).state() == "killed"
    (tmp_path / "end.json").write_text('{"error": "ConfigError", "message": "no", "time": 1}')
    assert DashboardRun(".", tmp_path).state() == "failed"


def test_a_policy_stands_on_every_answer(client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; " in policy
    assert "unsafe" not in policy
    nonce = policy.split("'nonce-")[1].split("'")[0]
    assert f'nonce="{nonce}"' in page.text
    assert nonce not in client.get("/").headers["content-security-policy"]
    for path in ("/static/app.js", "/viewer/dom.js", "/api/list_runs", "/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'"), path
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8642"}, 200),
        ({"host": "attacker.example"}, 403),
        ({"origin": "https://attacker.example"}, 403),
        ({"origin": "http://127.0.0.1:8642"}, 200),
    ],
)
def test_without_a_token_other_hosts_and_origins_are_refused(
    client: TestClient, headers: dict[str, str], status: int
) -> None:
    reply = client.get("/api/list_runs", headers=headers)
    assert reply.status_code == status
    if status == 403 and "host" in headers:
        assert TOKEN_VARIABLE in reply.json()["error"]


def test_off_the_loopback_a_token_is_needed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert view_token("127.0.0.1") is None
    with pytest.raises(Exception, match=f"set {TOKEN_VARIABLE}"):
        view_token("0.0.0.0")
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(Exception, match=f"{TOKEN_VARIABLE} has 5 characters"):
        view_token("0.0.0.0")
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-of-24-characters")
    token = view_token("0.0.0.0")
    with TestClient(make_app(Runs(root), token), base_url="http://machine.example", follow_redirects=False) as client:
        assert client.get("/").headers["location"] == "login"
        for path in ("/api/list_runs", "/static/app.js", "/viewer/dom.js"):
            assert client.get(path).status_code == 401, path
        assert client.get("/api/list_runs", headers={"authorization": f"Bearer {token}"}).status_code == 200
        assert client.get("/api/list_runs", headers={"cookie": f"agentrl_view={token}"}).status_code == 401
        assert client.get("/login").status_code == 200
        assert client.post("/login", content="token=wrong").status_code == 401
        reply = client.post("/login", content=f"token={token}")
        assert reply.status_code == 303
        cookie = reply.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert token is not None
        assert token not in cookie
        assert client.get("/api/list_runs").status_code == 200


def test_secrets_are_shown_nowhere(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    config = "sampler: {api_key: a-secret-key}\ntools: {search: {url: 'http://me:a-secret-word@machine'}}\n"
    (tmp_path / "run" / "config.yaml").write_text(config)
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "engine-0.log").write_text("started with --api-key a-secret-key\n")
    with TestClient(make_app(Runs(tmp_path)), base_url=HERE) as client:
        texts = [client.get("/api/cluster", params={"run": "run"}).text]
        texts.append(client.get("/api/comparison", params={"run": "run", "other": "run"}).text)
        texts.append(client.get("/api/log", params={"run": "run", "name": "engine-0.log"}).text)
    assert "sampler.api_key" in texts[0]
    assert "started with" in texts[2]
    assert not [text for text in texts if "a-secret" in text]
