"""``env.roles``: who plays in a run."""

import pytest
from pydantic import ValidationError

from agentrl.config.checks import check
from agentrl.config.schema import Config
from agentrl.config.tasks import EnvConfig
from agentrl.core.errors import ConfigError, ModelError, UnknownNameError, UserError
from agentrl.core.lineup import EndpointSeat, Lineup, PolicySeat, ScriptedSeat
from agentrl.models.reference_policy import pin_frozen, resolve_frozen
from agentrl.runtime.roles import make_lineup
from agentrl.self_play.opponents import check_self_play, eval_lineups


def lineup(name, options=None, **roles):
    return make_lineup(Config.model_validate({"env": {"name": name, "options": options or {}, "roles": roles}}))


def test_by_default_the_policy_plays_all_agents_of_an_environment_of_several():
    assert lineup("search_r1") is None
    assert lineup("tictactoe") == Lineup()


def test_a_role_has_a_scripted_player_an_endpoint_or_the_policy_untrained():
    made = lineup("tictactoe", second={"player": "minimax"})
    assert (made.seat("player_1", "second"), made.opponent) == (ScriptedSeat("minimax"), "fixed:minimax")
    assert made.seat("player_0", "first") == PolicySeat()
    made = lineup("kuhn_poker", player_0={"endpoint": {"url": "http://127.0.0.1:1/v1", "model": "big"}})
    assert isinstance(made.seat("player_0", "first"), EndpointSeat)
    assert made.opponent == "fixed:big"
    made = lineup("proposer_solver", {"solvers": 2}, proposer={"train": False})
    assert (made.seat("proposer", "proposer"), made.opponent) == (PolicySeat(trained=False), "mirror")


def test_a_frozen_role_is_played_by_the_engine_of_its_weights():
    roles = {"name": "solver_critic", "roles": {"critic": {"frozen": "initial"}}}
    made = make_lineup(Config.model_validate({"env": roles}), {"initial": (engine := object())})
    assert made.seat("critic", "critic") == PolicySeat(trained=False, sampler=engine, name="frozen initial")
    assert (made.seat("solver", "solver"), made.opponent) == (PolicySeat(), "fixed:frozen")


def test_initial_weights_are_those_of_the_start_in_later_runs_too(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    start = tmp_path.parent / "elsewhere"
    roles = {"critic": {"frozen": "initial"}, "solver": {}}
    config = Config.model_validate({"env": {"name": "solver_critic", "roles": roles}, "model": {"path": str(tmp_path)}})
    assert resolve_frozen(config) == {"initial": tmp_path}
    pinned = pin_frozen(config, start)
    assert [role.frozen for role in pinned.env.roles.values()] == [str(start), None]
    assert pin_frozen(pinned, tmp_path) == pinned, "a resumed run"
    with pytest.raises(ModelError, match=r"env\.roles\.critic\.frozen=.*elsewhere"):
        resolve_frozen(pinned)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"placement": {"mode": "disaggregate"}}, r"critic\.frozen=initial with placement\.mode=disaggregate"),
        ({"self_play": {}}, r"self_play with env\.roles \(critic\)"),
    ],
)
def test_frozen_roles_have_an_engine_that_is_not_placed_and_no_league(more, message):
    env = {"name": "solver_critic", "roles": {"critic": {"frozen": "initial"}}}
    with pytest.raises(ConfigError, match=message):
        check(Config.model_validate({"env": env} | more))


@pytest.mark.parametrize(
    ("name", "roles", "error", "message"),
    [
        ("search_r1", {"first": {}}, ConfigError, "env.name=search_r1 has one agent"),
        ("tictactoe", {"frist": {}}, UnknownNameError, "Did you mean 'first'"),
        ("tictactoe", {"first": {"player": "minmax"}}, UnknownNameError, r"\(env\.roles\.first\.player\).*'minimax'"),
        (
            "tictactoe",
            {"first": {"player": "no.py:P"}},
            ConfigError,
            r"^env\.roles\.first\.player=no\.py:P: there is no file",
        ),
        ("solver_critic", {"solver": {"train": False}, "critic": {"train": False}}, ConfigError, "trained in no role"),
    ],
)
def test_roles_that_do_not_fit_are_refused(name, roles, error, message):
    with pytest.raises(error, match=message):
        lineup(name, **roles)


def test_roles_with_one_policy_share_it_and_each_policy_is_an_adapter():
    roles = {"first": {"policy": "a"}, "second": {"frozen": "initial"}, "player_1": {"policy": "a"}}
    made = lineup("tictactoe", **roles)
    assert made.seat("player_0", "first") == PolicySeat("a", name="a")
    assert made.seat("player_1", "") == PolicySeat("a", name="a"), "by agent before by role"
    assert (
        lineup("solver_critic", solver={"policy": "a"}, critic={"frozen": "initial"}).seat("critic", "").policy
        == "main"
    )
    config = policies("a", "b")
    check(config)
    assert config.learner.lora.policies == ["a", "b"]
    assert Config.model_validate(config.model_dump()).learner.lora.policies == ["a", "b"], "as a resumed run reads it"
    assert policies("a", "a").learner.lora.policies == ["a"]


def policies(first, second, **more):
    roles = {"first": {"policy": first}, "second": {"policy": second}}
    run = {"learner": {"lora": {}}, "weights": {"adapters": "only"}, "env": {"name": "tictactoe", "roles": roles}}
    return Config.model_validate(run | more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"learner": {}}, r"the policies a, b, which are adapters .*: set learner\.lora=\{\}"),
        ({"weights": {}}, r"the policies a, b, and weights\.adapters=merged: .*; set weights\.adapters=only"),
        ({"rollout": {"generate": "m:f"}}, r"the policies a, b with rollout\.generate=m:f"),
    ],
)
def test_several_policies_need_adapters(more, message):
    with pytest.raises(ConfigError, match=message):
        check(policies("a", "b", **more))


def test_the_name_of_a_run_with_one_policy_is_taken():
    with pytest.raises(ConfigError, match=r"env\.roles names a policy main, .*; choose another name"):
        check(policies("main", "b"))


def test_names_of_policies_and_of_adapters_agree():
    with pytest.raises(
        ValidationError, match=r"learner\.lora\.policies=\['c'\], and env\.roles names the policies \['a', 'b'\]"
    ):
        policies("a", "b", learner={"lora": {"policies": ["c"]}})


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"solver": {"policy": "a"}, "critic": {}}, r"none plays the role critic; set env\.roles\.critic\.policy"),
        ({"solver": {"policy": "a"}, "critic": {"policy": "b", "train": False}}, "the policy b is trained in no role"),
    ],
)
def test_each_role_has_a_policy_and_each_policy_a_role_that_trains_it(roles, message):
    with pytest.raises(ConfigError, match=message):
        lineup("solver_critic", **roles)


def test_self_play_takes_the_policy_of_each_role_and_nothing_else_from_roles():
    check(policies("a", "b", self_play={}))


def test_self_play_and_roles_both_say_who_plays():
    config = {"env": {"name": "tictactoe", "roles": {"second": {"player": "random"}}}, "self_play": {}}
    with pytest.raises(ConfigError, match=r"self_play with env\.roles \(second\)"):
        check(Config.model_validate(config))


def test_a_role_has_one_player():
    with pytest.raises(ValidationError, match="a role has one player"):
        EnvConfig.model_validate({"roles": {"a": {"player": "x", "endpoint": {"url": "http://u", "model": "m"}}}})


@pytest.mark.parametrize("player", [{"player": "random"}, {"frozen": "initial"}])
def test_only_a_policy_is_not_trained_by_choice(player):
    with pytest.raises(ValidationError, match=r"train=false with .*, which is never trained; leave out train"):
        EnvConfig.model_validate({"roles": {"a": {**player, "train": False}}})


def program(*, reward="session", agents=("white", "black"), **more):
    agent = {"command": "python arena.py", "reward": reward, "agents": {name: {} for name in agents}}
    return Config.model_validate({"env": {"name": "single_turn"}, "rollout": {"agent": agent}} | more)


def test_agents_of_a_program_are_played_as_those_of_an_environment(tmp_path):
    assert make_lineup(program()) == Lineup()
    assert make_lineup(program(agents=())) is None
    player = tmp_path / "player.py"
    player.write_text("class Random: ...\n")
    roles = {"white": {"frozen": "initial"}, "black": {}, "grey": {"player": f"{player}:Random"}}
    three = program(agents=roles, env={"name": "single_turn", "roles": roles})
    made = make_lineup(three, {"initial": (engine := object())})
    assert made.seat("white", "white") == PolicySeat(trained=False, sampler=engine, name="frozen initial")
    assert made.seat("grey", "grey") == ScriptedSeat(f"{player}:Random")
    assert made.opponent == f"fixed:frozen+{player}:Random"
    adapters = {"white": {"policy": "a"}, "black": {"policy": "b"}}
    env = {"name": "single_turn", "roles": adapters}
    check(program(env=env, learner={"lora": {}}, weights={"adapters": "only"}))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"wite": {}}, "Did you mean 'white'"),
        ({"white": {"player": "random"}}, "random is no player of an agent program"),
        ({"white": {"train": False}, "black": {"train": False}}, r"trained in no role of rollout\.agent\.command"),
    ],
)
def test_roles_of_a_program_that_do_not_fit_are_refused(roles, message):
    with pytest.raises(UserError, match=message):
        make_lineup(program(env={"name": "single_turn", "roles": roles}))


def test_agents_of_a_program_are_seats_of_self_play(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bot.py").write_text("class Bot: ...\n")
    play = {"mix": {"mirror": 1, "past": 1}, "eval": {"opponents": ["mirror", "fixed:bot.py:Bot"]}}
    config = program(self_play=play)
    check(config)
    check_self_play(config)
    lineups = eval_lineups(config)
    assert [lineup.opponent for lineup in lineups["bot.py:Bot"]] == ["fixed:bot.py:Bot"] * 2
    assert lineups["bot.py:Bot"][1].seat("white", "white") == ScriptedSeat("bot.py:Bot")
    with pytest.raises(ConfigError, match=r"the rewards of all agents.*set rollout\.agent\.reward=session"):
        check(program(self_play=play, reward="function"))
    with pytest.raises(ConfigError, match="whose episodes have one agent"):
        check(program(self_play=play, agents=()))
    with pytest.raises(UserError, match=r"player of .*random|random.*self_play\.mix"):
        check_self_play(program(self_play={"mix": {"fixed:random": 1}}))
