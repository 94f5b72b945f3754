"""Agent programs: what is refused before a run, sandboxes, and a killed run of two agents. `test_examples` trains one."""

import asyncio
import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from agentrl_envs.tictactoe import TicTacToeEnv
from gateway_episodes import TASK, make_test_renderer
from program_episodes import fake_harness, play_program
from requires import require_bubblewrap
from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, Running, Services, gone, here, metrics

from agentrl import Rollout
from agentrl.audit.run import rollout_faults
from agentrl.batch.provenance import check_rows
from agentrl.config.agent import AgentConfig, SeatProgramConfig
from agentrl.config.rollout import FailureConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.env import Env
from agentrl.core.lineup import Lineup
from agentrl.core.types import SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.gateway.program import AgentProgram, ProgramLauncher
from agentrl.gateway.program_player import MOVES, GatewaySeatProgram
from agentrl.obs.journal import read_journal
from agentrl.obs.rollouts import read_rollouts, rollout_files
from agentrl.testing import ScriptedSampler

pytestmark = pytest.mark.slow


def test_a_program_that_does_not_exist_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    done = here(
        "train", "--env", "single_turn", "data.path=train.jsonl", "reward=exact_match", "data.label_key=prompt",
        "rollout.agent.command=no-such-agent", "run.dir=run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rollout.agent.command=no-such-agent: there is no program no-such-agent" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()


EXAMPLE = Path(__file__).parents[2] / "examples" / "09_agent_program"
SANDBOXED = """
import json, os, socket, sys, urllib.error, urllib.request
from urllib.parse import urlsplit

gateway = urlsplit(os.environ["OPENAI_BASE_URL"])


def attempt(action):
    try:
        return str(action())
    except Exception as error:
        return type(error).__name__


def ask(address, opener):
    body = json.dumps({"messages": [{"role": "user", "content": sys_prompt}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(f"http://{address}/v1/chat/completions", body, headers)
    return json.load(opener.open(request))["choices"][0]["message"]["content"]


sys_prompt = sys.stdin.read()
assert sys_prompt == os.environ["AGENTRL_PROMPT"]
directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
by_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({"http": os.environ["http_proxy"]}))
results = {
    "reply": ask(gateway.netloc, directly) + ask(gateway.netloc, by_proxy),
    "directly": attempt(lambda: socket.create_connection(("127.0.0.2", 1), 5)),
    "elsewhere": attempt(lambda: by_proxy.open("http://127.0.0.2:1/")),
    "home": attempt(lambda: os.listdir(HOME)),
}
json.dump(results, open("answer.txt", "w"))
"""


@pytest.fixture(params=["bubblewrap", "docker"])
def sandbox(request: pytest.FixtureRequest) -> SandboxConfig:
    if request.param == "docker":
        dockerd = request.getfixturevalue("dockerd")
        return SandboxConfig(backend="docker", docker_url=dockerd.url, image=dockerd.image)
    require_bubblewrap()
    return SandboxConfig()


def test_a_program_in_a_sandbox_reaches_only_the_gateway(sandbox: SandboxConfig, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SANDBOXED.replace("HOME", repr(str(tmp_path))))
    renderer = make_test_renderer()
    results: list[dict[str, str]] = []

    class Reader:
        group = False

        async def grade(self, rollouts: Sequence[Rollout], tools: object = None) -> None:
            for rollout in rollouts:
                results.append(json.loads(Path(rollout.metadata["agent_folder"], "answer.txt").read_text()))

    config = AgentConfig(command="python3 agent.py", files=tmp_path, sandbox=sandbox.backend)
    sampler = ScriptedSampler(["one", "two"], encode=renderer.encode, end_token_id=renderer.end_token_id)
    context = EpisodeContext(Env, renderer, sampler, {}, Limits(4, 4096, 60.0, 64), SamplingParams(seed=5))
    settings = EpisodeSettings(context, AgentProgram(config, sandbox), Reader())
    runner = EpisodeRunner({"": settings}, FailurePolicy(FailureConfig(max_failed_share=1)), EpisodeSlots(4))
    (rollout,) = asyncio.run(runner.run_many([Job(TASK, 1, "e")]))
    assert rollout.failure is None, rollout.failure
    refusals = {"directly": "ConnectionRefusedError", "elsewhere": "HTTPError", "home": "FileNotFoundError"}
    assert results == [{"reply": "onetwo", **refusals}]


@pytest.mark.long
def test_programs_in_sandboxes_play_both_seats(sandbox: SandboxConfig, tmp_path: Path) -> None:
    """One is started once, in a sandbox that lives as long as the game; the other has a sandbox for each move."""
    for name in ("player.py", "mover.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    renderer = make_test_renderer()

    def program(command: str, **keys: str) -> GatewaySeatProgram:
        config = SeatProgramConfig.model_validate(
            {"command": f"python3 {command}", "files": tmp_path, "sandbox": sandbox.backend, **keys}
        )
        return GatewaySeatProgram(config, ProgramLauncher(config, sandbox))

    def play(programs: dict[str, GatewaySeatProgram]) -> list[Rollout]:
        moves = {"e.player_0": ["1", "2", "3"], "e.player_1": ["4", "5"]}
        sampler = ScriptedSampler(moves, encode=renderer.encode, end_token_id=renderer.end_token_id)
        context = EpisodeContext(TicTacToeEnv, renderer, sampler, {}, Limits(9, 4096, 120.0, 8), SamplingParams(seed=5))
        settings = EpisodeSettings(context, lineup=Lineup(), programs=programs)
        runner = EpisodeRunner({"": settings}, FailurePolicy(FailureConfig(max_failed_share=1)), EpisodeSlots(4))
        return asyncio.run(runner.run_many([Job(TicTacToeEnv.example_task(), 1, "e")]))

    programs = {"first": program("player.py", start="episode"), "second": program("mover.py", answer="output")}
    first, second = play(programs)
    assert (first.failure, second.failure) == (None, None)
    assert (first.metadata[MOVES], second.metadata[MOVES]) == (["1", "2", "3"], ["4", "5"])
    assert (first.reward, second.reward) == (1.0, -1.0)
    for rollout, without in zip((first, second), play({}), strict=True):
        assert [turn.action for turn in rollout.turns] == [turn.action for turn in without.turns]
        assert rollout.sampled_tokens == without.sampled_tokens > 0
        check_rows(rollout.rows)
        assert rollout_faults(rollout) == []


CLIENT = """
import http.client, json, os
from urllib.parse import urlsplit

agents = json.loads(os.environ["AGENTRL_AGENTS"])

def post(agent, path, body):
    url = urlsplit(agents[agent])
    connection = http.client.HTTPConnection(url.netloc)
    connection.request("POST", url.path + path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    return json.load(response)

def ask(agent, *messages):
    return post(agent, "/chat/completions", {"messages": messages})["choices"][0]["message"]
"""
TEAM = """
prompt = {"role": "user", "content": os.environ["AGENTRL_PROMPT"]}
plan = ask("planner", prompt)
code = ask("coder", {"role": "user", "content": plan["content"][:20] + "?"})
ask("planner", prompt, plan, {"role": "user", "content": code["content"][:20] + "?"})
post("planner", "/session/reward", {"reward": len(plan["content"]) % 7 / 7, "metrics": {"length": len(plan["content"])}})
post("coder", "/session/reward", {"reward": len(code["content"]) % 5 / 5})
"""
STEPS = 3


@pytest.mark.long
def test_an_asynchronous_run_of_two_agents_that_is_killed_trains_each_of_them_once(
    services: Services, tmp_path: Path
) -> None:
    (tmp_path / "team.py").write_text(CLIENT + TEAM)
    rows = [json.dumps({"prompt": f"Who is {name}?"}) for name in ("Remu", "Sadova", "Vage Fena", "Velo Doda")]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    words = [
        "train", "--env", "single_turn", "data.path=tasks.jsonl", "data.eval_path=tasks.jsonl", "eval.size=1", "run.dir=run",
        f"rollout.agent.command={sys.executable} -I -S team.py", "rollout.agent.reward=session",
        "rollout.agent.agents={planner: {}, coder: {role: worker}}", "algo.advantage.name=seat_grpo", "async.max_staleness=1",
        "rollout.batch_size=1", "rollout.n_samples_per_prompt=2", "rollout.max_turns=2", "sampler.max_new_tokens=8",
        f"train.steps={STEPS}", "train.save_every=1", "train.eval_every=2", "train.eval_first=false", "obs.tensorboard=false",
        "model.path=multihop-warm", *ONE_THREAD,
    ]  # fmt: skip
    run = Running(*words, f"sampler.url={services.engine()}", cwd=tmp_path, target=IN_PROCESS_LEARNER)
    folder = tmp_path / "run"
    try:
        run.wait_for((folder / "checkpoints" / "step_000001").exists)
        children = run.descendants()
        run.send(signal.SIGKILL)
        assert run.finish() != 0
    finally:
        run.end()
    assert gone(children) == [], "agent programs"
    services.engine()  # has no request of the killed run any more
    run = Running("train", "--resume", "run.dir=run", cwd=tmp_path, target=IN_PROCESS_LEARNER)
    try:
        assert run.finish() == 0, run.output()
    finally:
        run.end()
    files = rollout_files(folder / "rollouts")
    rollouts = [rollout for file in files.values() for rollout in read_rollouts(file)]
    assert Counter((rollout.agent, rollout.role, rollout.seat) for rollout in rollouts) == {
        ("planner", "planner", 0): 2 * STEPS,
        ("coder", "worker", 1): 2 * STEPS,
    }
    assert len({rollout.rollout_id for rollout in rollouts}) == 4 * STEPS, "each is trained once"
    assert all(rollout.seats[0].steps == (0, 2) for rollout in rollouts)
    assert all(rollout.seat_rewards[rollout.seat] == rollout.reward for rollout in rollouts)
    steps = [row for row in metrics(folder) if "train/reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert {"train/reward/role=planner", "train/reward/role=worker", "rollout/length/role=planner"} <= set(steps[0])
    assert [row["step"] for row in metrics(folder) if "eval/reward" in row] == [2, 3]
    state = read_journal(folder)
    assert state is not None
    assert (state.faults(), state.waiting, state.trained) == ([], [], STEPS)
    audit = here("audit", "run", cwd=tmp_path)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    view = here("view", "run", "--step", "1", cwd=tmp_path)
    assert view.returncode == 0, view.stderr
    assert "coder" in view.stdout
    doctor = here("doctor", "run", cwd=tmp_path)
    assert doctor.returncode in (0, 1), doctor.stdout + doctor.stderr
    assert "Traceback" not in doctor.stdout + doctor.stderr


@pytest.mark.parametrize("sandbox", ["bubblewrap"], indirect=True)
def test_a_harness_of_this_machine_runs_in_bubblewrap(sandbox: SandboxConfig, tmp_path: Path) -> None:
    rollout, _ = play_program(fake_harness(tmp_path, sandbox.backend), ["Remu"], make_test_renderer(), sandbox)
    assert rollout.failure is None, rollout.failure
    assert rollout.reward == 1.0


@pytest.mark.long
def test_programs_are_trained_as_players_of_a_game(tmp_path: Path) -> None:
    """One is started once, the other for each move; evaluation, files, audit, viewer and doctor are as for other rollouts."""
    for name in ("game.yaml", "player.py", "mover.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    run = Running(
        "train", "--config", "game.yaml", "rollout.batch_size=2", "rollout.n_samples_per_prompt=2", "train.steps=2",
        "train.eval_every=2", "train.eval_first=false", "eval.size=2", "run.dir=run", "obs.progress=plain",
        "obs.tensorboard=false", cwd=tmp_path, target=IN_PROCESS_LEARNER,
    )  # fmt: skip
    try:
        assert run.finish() == 0, run.output()
    finally:
        run.end()
    rollouts = [rollout for file in rollout_files(tmp_path / "run").values() for rollout in read_rollouts(file)]
    assert [(rollout.agent, rollout.role) for rollout in rollouts] == 8 * [
        ("player_0", "first"),
        ("player_1", "second"),
    ]
    for rollout in rollouts:
        assert rollout.failure is None, rollout.failure
        assert [turn.action for turn in rollout.turns] == rollout.metadata["program_moves"]
        assert len(rollout.rows) == len(rollout.turns), "each observation replaces the conversation"
        assert sum(int(row.mask.sum()) for row in rollout.rows) == rollout.sampled_tokens
        assert [turn.reward for turn in rollout.turns[:-1]] == [0.0] * len(rollout.turns[:-1])
        assert not rollout.turns or rollout.turns[-1].reward == rollout.reward
        assert rollout.seats[rollout.seat].steps == tuple(range(rollout.seat, 9, 2))[: len(rollout.turns)]
    assert max(len(rollout.turns) for rollout in rollouts) >= 3
    assert {turn.reward for rollout in rollouts for turn in rollout.turns[-1:]} & {-1.0, 1.0}, "games were won"
    *steps, evaluation = metrics(tmp_path / "run")
    assert {"train/reward/role=first", "rollout/moves/role=second"} <= set(steps[0])
    assert evaluation["eval/episodes"] >= 4
    for words in (("audit", "run"), ("view", "run", "--step", "1"), ("doctor", "run")):
        read = here(*words, cwd=tmp_path)
        assert read.returncode == 0 or words[0] == "doctor", read.stdout + read.stderr
        assert "Traceback" not in read.stdout + read.stderr


ARENA = """
moves = [ask(agent, {"role": "user", "content": "Go."})["content"] for agent in ("white", "black")]
won = (len(moves[0]) > len(moves[1])) - (len(moves[0]) < len(moves[1]))
post("white", "/session/reward", {"reward": won})
post("black", "/session/reward", {"reward": -won})
"""


@pytest.mark.long
def test_agents_of_a_program_play_snapshots_of_the_policy(tmp_path: Path) -> None:
    (tmp_path / "arena.py").write_text(CLIENT + ARENA)
    (tmp_path / "games.jsonl").write_text("\n".join(json.dumps({"prompt": f"Game {game}"}) for game in range(8)))
    run = Running(
        "train", "--env", "single_turn", "data.path=games.jsonl", "run.dir=run", "model.path=multihop-warm",
        f"rollout.agent.command={sys.executable} -I -S arena.py", "rollout.agent.reward=session",
        "rollout.agent.agents={white: {}, black: {}}", "self_play={mix: {past: 1}, pool: {snapshot_every: 1}}",
        "algo.advantage.name=rae", "rollout.batch_size=2", "rollout.n_samples_per_prompt=2", "sampler.max_new_tokens=8",
        "train.steps=2", "obs.tensorboard=false", *ONE_THREAD, cwd=tmp_path, target=IN_PROCESS_LEARNER,
    )  # fmt: skip
    try:
        assert run.finish() == 0, run.output()
    finally:
        run.end()
    rollouts = [rollout for file in rollout_files(tmp_path / "run").values() for rollout in read_rollouts(file)]
    assert [rollout.opponent for rollout in rollouts] == ["past"] * 8, "one of each game"
    assert Counter(rollout.agent for rollout in rollouts) == {"white": 4, "black": 4}, "each seat in turn"
    opponents = [seat for rollout in rollouts for seat in rollout.seats if not seat.trained]
    assert {seat.player for seat in opponents} == {"step_000000", "step_000001"}
    assert all(len(seat.moves) == 1 for seat in opponents)
    assert here("audit", "run", cwd=tmp_path).returncode == 0
    league = here("league", "run", cwd=tmp_path)
    assert "step_000001" in league.stdout, league.stderr


@pytest.mark.long
def test_self_play_against_snapshots_goes_on_after_a_kill_with_programs_in_the_seats(tmp_path: Path) -> None:
    """Snapshots of the policy are the model of the opponent's program; a scripted opponent plays without it."""
    for name in ("player.py", "mover.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    roles = {
        "first": {"program": {"command": f"{sys.executable} player.py", "start": "episode"}},
        "second": {"program": {"command": f"{sys.executable} mover.py", "answer": "output"}},
    }
    steps = 3
    run = Running(
        "train", "--config", "self_play/tictactoe", "run.dir=run", "env.options={show_lines: true}",
        f"env.roles={json.dumps(roles)}", "self_play.mix={mirror: 0, past: 1, 'fixed:random': 1}",
        "self_play.pool.snapshot_every=1", "async.max_staleness=1",
        "rollout.batch_size=2", "rollout.n_samples_per_prompt=4", "rollout.concurrency=8",
        f"train.steps={steps}", "train.save_every=1", "train.eval_every=0", "train.eval_first=false", "eval.size=2",
        "obs.tensorboard=false", *ONE_THREAD, cwd=tmp_path, target=IN_PROCESS_LEARNER,
    )  # fmt: skip
    folder = tmp_path / "run"
    try:
        run.wait_for((folder / "checkpoints" / "step_000001").exists)
        children = run.descendants()
        run.send(signal.SIGKILL)
        assert run.finish() == -signal.SIGKILL
    finally:
        run.end()
    assert gone(children) == [], "programs and engines"
    run = Running("train", "--resume", "run.dir=run", cwd=tmp_path, target=IN_PROCESS_LEARNER)
    try:
        assert run.finish() == 0, run.output()
    finally:
        run.end()
    rollouts = [rollout for file in rollout_files(folder / "rollouts").values() for rollout in read_rollouts(file)]
    assert len(rollouts) == len({rollout.rollout_id for rollout in rollouts}) == 8 * steps, "each is trained once"
    assert {rollout.agent for rollout in rollouts} == {"player_0", "player_1"}
    assert {rollout.opponent for rollout in rollouts} == {"past", "fixed:random"}
    for rollout in rollouts:
        assert rollout.failure is None, rollout.failure
        assert rollout.metadata["program_moves"] == [turn.action for turn in rollout.turns]
        (opponent,) = (seat for seat in rollout.seats if not seat.trained)
        assert opponent.player.startswith("step_") == (rollout.opponent == "past")
    state = read_journal(folder)
    assert state is not None
    assert (state.faults(), state.waiting, state.trained) == ([], [], steps)
    for words in (("audit", "run"), ("league", "run")):
        read = here(*words, cwd=tmp_path)
        assert read.returncode == 0, read.stdout + read.stderr
