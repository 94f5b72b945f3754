"""Environments of roles that work together."""

import numpy as np
import pytest
from agentrl_envs.proposer_solver import ProposerSolverEnv
from agentrl_envs.solver_critic import SolverCriticEnv

from agentrl import ConfigError, Message, Task
from agentrl.testing import check_multi_agent_env


def acted(env, *texts):
    """Let the acting agents say the texts; return the rewards, and what the next agents read."""
    actions = {agent: Message("assistant", text) for agent, text in zip(env.acting, texts, strict=True)}
    views, rewards, _, _, infos = env.step(actions)
    return rewards, {agent: view["messages"][0].content for agent, view in views.items() if view["messages"]}, infos


@pytest.mark.parametrize("env", [SolverCriticEnv, ProposerSolverEnv])
def test_contract(env):
    check_multi_agent_env(env)
    train, held_out = env.tasks("train", 0), env.tasks("eval", 0)
    assert train[0] == env.tasks("train", 0)[0] != train[1]
    assert train[0].id != held_out[0].id


def test_the_critic_helps_the_solver():
    env = SolverCriticEnv()
    env.reset(seed=0, options={"task": Task("t", (Message("user", "7 + 15 = ?"),), answer="22")})
    assert acted(env, "It is 23")[:2] == (
        {"solver": 0.0, "critic": 0.0},
        {"critic": "7 + 15 = ? Answer: 23. Right or wrong?"},
    )
    assert acted(env, "Wrong: too large.")[1] == {"solver": "Wrong: too large. Answer again."}
    rewards, _, infos = acted(env, "<think>7 + 15</think> 22")
    assert rewards == {"solver": 1.0, "critic": 1.5}
    episode = {"first_right": 0.0, "last_right": 1.0, "verdict_right": 1.0}
    assert infos["solver"]["metrics"] == {**episode, "solver_illegal": 0.0}
    assert infos["critic"]["metrics"] == {**episode, "critic_illegal": 0.0}


def test_a_turn_of_the_wrong_form_costs_and_the_episode_goes_on():
    env = SolverCriticEnv(illegal_cost=0.25)
    env.reset(seed=0)
    assert acted(env, "no idea")[0] == {"solver": -0.25, "critic": 0.0}
    assert acted(env, "hm")[0] == {"solver": 0.0, "critic": -0.25}
    rewards, _, infos = acted(env, "8")
    assert rewards == {"solver": 0.0, "critic": 0.0}
    assert infos["solver"]["metrics"]["solver_illegal"] == infos["critic"]["metrics"]["critic_illegal"] == 1.0


def test_digits_of_other_scripts_are_no_answer():
    env = SolverCriticEnv(illegal_cost=0.5)
    env.reset(seed=0)
    assert acted(env, "٧")[0] == {"solver": -0.5, "critic": 0.0}


def test_a_right_first_answer_is_rewarded_when_it_is_given():
    env = SolverCriticEnv(first_reward=0.25)
    env.reset(seed=0)
    assert acted(env, "7")[0] == {"solver": 0.25, "critic": 0.0}
    acted(env, "right")
    assert acted(env, "7")[0]["solver"] == 1.0


def test_sums_to_evaluate_on_are_not_trained_on():
    questions = [{task.question for task in SolverCriticEnv.tasks(split, 0)} for split in ("train", "eval")]
    assert not questions[0] & questions[1]
    swapped = {" ".join([b, "+", a, "= ?"]) for a, _, b, *_ in map(str.split, questions[1])}
    assert swapped == questions[1]
    assert [len(question) for question in questions] == [441 - len(questions[1]), len(questions[1])]


@pytest.mark.parametrize(
    ("answers", "proposer"),
    [
        (("19", "19", "1", "2"), 1.0),
        (("19",) * 4, 0.0),
        (("1", "19", "19", "19"), 0.75),
        (("19", "9" * 5000, "1", "19"), 1.0),
    ],
)
def test_a_problem_is_worth_most_if_half_of_the_solvers_solve_it(answers, proposer):
    env = ProposerSolverEnv()
    env.reset(seed=0)
    _, read, _ = acted(env, "7 + 12")
    assert read == {f"solver_{number}": "7 + 12 = ?" for number in range(4)}
    rewards, _, infos = acted(env, *answers)
    assert rewards["proposer"] == proposer
    assert [rewards[f"solver_{number}"] for number in range(4)] == [float(answer == "19") for answer in answers]
    assert infos["proposer"]["metrics"]["solved"] == answers.count("19") / 4
    assert {env.role_of(agent) for agent in env.possible_agents} == {"proposer", "solver"}


@pytest.mark.parametrize("text", ["", "7 / 2", "7 + 21", "8 + 8", "٧ + 12", "import os"])
def test_what_is_no_problem_costs_the_proposer(text):
    env = ProposerSolverEnv(solvers=1)
    env.reset(seed=0)
    rewards, _, infos = acted(env, text)
    assert rewards == {"proposer": -0.5, "solver_0": 0.0}
    assert (env.agents, infos["proposer"]["metrics"]) == ([], {"proposer_illegal": 1.0})


def test_a_held_out_problem_is_solved_in_evaluation_alone():
    env = ProposerSolverEnv(solvers=2, operations="+")
    problems = set()
    for task in env.tasks("eval", 0)[:77]:
        views, _ = env.reset(seed=0, options={"task": task})
        assert env.acting == ("solver_0", "solver_1")
        assert not views["proposer"]["messages"]
        problems.add(env.problem)
    assert len(problems) == 77
    for problem in sorted(problems)[:20]:
        env.reset(seed=0, options={"task": Task("t", (), metadata={"number": int(problem.split()[0])})})
        rewards, _, infos = acted(env, problem)
        assert (env.agents, set(rewards.values())) == ([], {0.0})
        assert "solved" not in infos["solver_0"]["metrics"]


def played(env, task, seed):
    """Let careless players play all agents of an episode; return the last infos."""
    rng = np.random.default_rng(seed)
    players = {agent: env.players["careless"](rng) for agent in env.possible_agents}
    views, infos = env.reset(seed=seed, options={"task": task})
    while env.acting:
        actions = {
            agent: Message("assistant", players[agent].act(views[agent]["messages"], infos[agent]["legal_moves"]))
            for agent in env.acting
        }
        views, _, _, _, infos = env.step(actions)
    return infos


def test_careless_players_are_legal_and_right_in_about_half_of_the_sums():
    env, tasks = SolverCriticEnv(), SolverCriticEnv.tasks("train", 0)
    metrics = [
        {**actual["solver"]["metrics"], **actual["critic"]["metrics"]}
        for actual in (played(env, tasks[index % len(tasks)], index) for index in range(600))
    ]
    mean = {name: np.mean([metric[name] for metric in metrics]) for name in metrics[0]}
    assert mean["solver_illegal"] == mean["critic_illegal"] == 0
    assert 0.4 < mean["first_right"] < 0.65
    assert 0.6 < mean["verdict_right"] < 0.7
    env, tasks = ProposerSolverEnv(), ProposerSolverEnv.tasks("train", 0)
    metrics = [played(env, tasks[index], index)["proposer"]["metrics"] for index in range(200)]
    assert not any(metric["proposer_illegal"] for metric in metrics)
    assert 0.4 < np.mean([metric["solved"] for metric in metrics if "solved" in metric]) < 0.9


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"env\.options\.solvers=0"):
        ProposerSolverEnv(solvers=0)
    with pytest.raises(ConfigError, match=r"env\.options\.largest=1000"):
        ProposerSolverEnv(largest=1000)
    with pytest.raises(ConfigError, match=r"env\.options\.operations='\+/'"):
        ProposerSolverEnv(operations="+/")
    with pytest.raises(ConfigError, match=r"env\.options\.illegal_cost=-1"):
        SolverCriticEnv(illegal_cost=-1)
