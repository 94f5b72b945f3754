"""Judges that engines of the run serve: what they sample, and which engines there are."""

import asyncio
from pathlib import Path

import pytest

from agentrl.config.judges import judge_configs, judge_keys, named_judges, time_shared_judges
from agentrl.config.load import load_config
from agentrl.config.rewards import RewardConfig
from agentrl.core.errors import ConfigError, SamplerError
from agentrl.models.resolve import resolve_model
from agentrl.rewards.engine_judge import EngineJudge
from agentrl.rewards.grader import RewardGrader
from agentrl.runtime.endpoint_services import check_endpoint
from agentrl.runtime.judges import judge_fleets, open_judge_models, source_judges
from agentrl.testing.sampler import ScriptedSampler
from tests.byte_renderer import byte_renderer
from tests.scripted_endpoint import ScriptedEndpoint

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # noqa: E501
MODEL = "multihop-warm"


def test_an_engine_judges_by_the_models_own_chat_format(rollout):
    renderer = byte_renderer(TEMPLATE)
    sampler = ScriptedSampler(
        ["<think>[[3]]</think>\n\nSo [[9]]"], encode=renderer.encode, end_token_id=renderer.end_token_id
    )
    judge = EngineJudge("small", renderer, sampler)
    config = RewardConfig.model_validate({"function": "judge", "judge": {"model": "small", "rubric": "R"}})
    sample = rollout("4")
    asyncio.run(RewardGrader(config, {"judge": judge}).grade([sample]))
    [request] = sampler.requests
    prompt = renderer.decode(request.prompt.token_ids)
    assert prompt.startswith("<|im_start|>user\nJudge how well")
    assert prompt.endswith("<|im_start|>assistant\n")
    assert renderer.end_token_id in request.params.stop_token_ids
    assert (request.params.temperature, request.params.max_new_tokens) == (0.0, 1024)
    assert sample.reward == 0.9
    assert sample.metrics["judge/prompt_tokens"] == len(request.prompt.token_ids)
    assert sample.metrics["judge/completion_tokens"] > 20


def test_an_engine_that_refuses_a_judgement_is_no_reward(rollout):
    class Refuses(ScriptedSampler):
        async def generate(self, *arguments, **options):
            raise SamplerError("the request does not fit")

    config = RewardConfig.model_validate({"function": "judge", "judge": {"model": "small"}})
    sample = rollout("4")
    judge = EngineJudge("small", byte_renderer(TEMPLATE), Refuses([]))
    asyncio.run(RewardGrader(config, {"judge": judge}).grade([sample]))
    assert sample.dropped
    assert sample.failure is not None
    assert sample.failure.message == "the request does not fit"


JUDGE = f"{{model: {MODEL}, max_new_tokens: 32}}"
BASE = ["env.name=single_turn"]


def test_judges_with_one_model_share_its_engines(tmp_path: Path):
    functions = f"{{a: {{function: judge, judge: {JUDGE}}}, b: {{function: judge, judge: {JUDGE}}}, c: {{function: judge, judge: {{model: policy, max_new_tokens: 9}}}}}}"  # noqa: E501
    config = load_config(None, [*BASE, f"reward.functions={functions}"])
    assert [*judge_configs(config)] == [MODEL]
    models = open_judge_models(config)
    assert models[MODEL].folder == resolve_model(MODEL)
    fleets = judge_fleets(config, models, tmp_path, 2)
    assert [*fleets] == [MODEL]
    assert fleets[MODEL].vocabulary.size == models[MODEL].vocabulary.size
    assert (tmp_path / "judge-0").is_dir()
    renderer = byte_renderer(TEMPLATE)
    shared = ScriptedEndpoint([])
    judges = source_judges(config, {MODEL: shared}, renderer, ScriptedSampler([]))
    assert judges["a"] is judges["b"] is shared
    assert judges["c"].model == "policy"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["reward.judge={}"], "no judge: set endpoint.url and endpoint.model, or model"),
        (["reward.judge={model: policy, endpoint: {url: 'http://x', model: m}}"], "both name the judge"),
        (["reward.judge={model: policy, engines: 2}"], "engines is for a judge with engines of its own"),
        ([f"reward.judge={{model: {MODEL}}}"], "max_new_tokens=1024 leaves no place for a prompt in"),
        ([f"reward.judge={{model: {MODEL}, max_new_tokens: 9, sglang: {{tp_size: 2}}}}"], "takes no options of SGLang"),
        (["reward.judge={model: policy, gpus: own}"], "gpus=own is for a judge with engines of its own"),
        ([f"reward.judge={JUDGE}", "reward.judge.gpus=own"], "gpus=own with placement.mode=separate"),
        ([f"reward.judge={JUDGE}", "placement.mode=disaggregate", "async.max_staleness=1"],
         "on the policy's GPUs with placement.mode=disaggregate and async.max_staleness=1: .*set reward.judge.gpus=own"),
        ([f"sources={{x: {{reward: {{function: judge, judge: {JUDGE}}}}}}}", "placement.mode=disaggregate", "reward=f1",
          "eval.background=true"], "sources.x.reward.judge.model=multihop-warm on .*evaluations run all the time"),
        ([f"reward.judge={JUDGE}", "placement.mode=disaggregate", "weights.prefix_cache=by_version"], "memory of their cache"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*BASE, "reward=judge", *settings])


@pytest.mark.parametrize(
    ("placement", "gpus", "shared"),
    [("separate", "shared", False), ("colocate", "shared", True), ("disaggregate", "shared", True), ("colocate", "own", False)],
)  # fmt: skip
def test_whose_engines_share_the_policys_gpus_in_turn(placement, gpus, shared):
    config = load_config(None, [*BASE, "reward=judge", f"reward.judge={JUDGE}", f"placement.mode={placement}"])
    for _, judge in named_judges(config):
        judge.gpus = gpus
    assert [*time_shared_judges(config)] == ([MODEL] if shared else [])
    assert judge_keys(config) == {MODEL: "reward.judge"}
    config.sampler.url = "http://127.0.0.1:1"
    assert time_shared_judges(config) == {}, "engines that run already were not started to release their memory"


def test_a_policy_at_an_endpoint_has_no_engines():
    endpoint = "model.endpoint={url: 'http://127.0.0.1:1/v1', model: m}"
    config = load_config(None, [*BASE, "reward=judge", f"reward.judge={JUDGE}", endpoint])
    with pytest.raises(
        ConfigError, match=r"reward\.judge\.model=multihop-warm with model\.endpoint\.url=.*set reward\.judge\.endpoint"
    ):
        check_endpoint(config)
