"""Which ways new weights can take between which devices."""

from __future__ import annotations

import pytest

from agentrl.cli.main import build_parser
from agentrl.cli.train import load_run
from agentrl.config.engine_checks import check_context
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError

GPU = ["sampler.backend=sglang"]
CUT = ["sampler.top_p=0.9", "sampler.renormalise=learner"]
ENGINE = ["sampler.top_p=0.9", "sampler.renormalise=engine"]
CENTERED = [*ENGINE, "algo.score_centering=true", "algo.loss.name=reinforce"]
INVARIANT = [
    *("sampler.embedded.batch_invariant=true", "learner.batch_invariant=true", "learner.device=cpu"),
    *("learner.precision=float32", "learner.threads=1"),
]
NGRAM = [*GPU, "sampler.sglang.speculative_algorithm=ngram"]
EAGLE = [*GPU, "sampler.sglang.speculative_algorithm=EAGLE"]
ADAPTERS = ["weights.adapters=only", "learner.lora={}"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["weights.check=checksum", *GPU, "sampler.sglang={device: cpu, tp: 2}"], "set weights.check=version"),
        (["weights.adapters=only", *GPU], r"set learner\.lora="),
        ([*ADAPTERS, *GPU, "sampler.router=sglang"], r"set sampler\.router=builtin"),
        (["sampler.max_running=auto", "sampler.router=sglang"], r"set sampler\.router=builtin"),
        ([*ADAPTERS, *GPU, "placement.mode=colocate"], r"lose the base model; set weights\.adapters=merged"),
        ([*ADAPTERS, *GPU, "sampler.sglang={load-format: dummy}"], r"load_format=dummy: engines keep the weights"),
        ([*ADAPTERS, *GPU, "weights.transport=disk"], r"leave out weights\.transport"),
        ([*ADAPTERS, *GPU, "sampler.sglang={dp_size: 2}"], "tensor parallel ranks only"),
        ([*ADAPTERS, "weights.prefix_cache=keep"], r"leave out weights\.prefix_cache"),
        (["placement.mode=colocate", "weights.prefix_cache=keep"], "release the memory of their cache"),
        (["weights.prefix_cache=by_version", "sampler.router=sglang"], r"set sampler\.router=builtin"),
        ([*NGRAM, "sampler.sglang.device=cpu"], "most probable token"),
        (
            [*NGRAM, "sampler.sglang.speculative-accept-threshold-acc=0.9"],
            r"threshold_acc=0\.9: drafts are accepted more",
        ),
        ([*NGRAM, "algo.routing_replay=true"], r"leave out sampler\.sglang\.speculative_algorithm"),
        ([*GPU, "sampler.sglang.speculative_algorithm=DFLASH"], "set NGRAM, EAGLE"),
        ([*ADAPTERS, *EAGLE], "set speculative_algorithm=NGRAM"),
        ([*GPU, "sampler.sglang.tokenizer-worker-num=4"], r"tokenizer_worker_num=4: .*leave it out"),
        ([*GPU, "sampler.sglang.preferred_sampling_params={min_p: 0.1}"], "sampled from another distribution"),
        ([*GPU, "sampler.sglang.allow_auto_truncate=true"], r"sampler\.sglang\.allow_auto_truncate=True: prompts"),
        (
            [
                *GPU,
                "eval.background=true",
                "sampler.groups.a={serves: evaluation, sglang: {allow-auto-truncate: true}}",
            ],
            r"^sampler\.groups\.a\.sglang\.allow_auto_truncate=True: prompts",
        ),
        ([*EAGLE, "weights.transport=disk"], r"set weights\.transport=tensor"),
        ([*EAGLE, "weights.check=checksum"], r"set weights\.check=version"),
        ([*EAGLE, "placement.mode=colocate"], "enable_draft_weights_cpu_backup=true"),
        (["weights.pause=in_place", *GPU], r"set weights\.prefix_cache=by_version"),
    ],
)
def test_ways_that_lead_nowhere(settings: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["weights.dtype=bfloat16"],
        INVARIANT,
        ["sampler.embedded.batch_invariant=true"],
        ["weights.check=checksum", *GPU],
        ["weights.pause=in_place", "weights.prefix_cache=by_version", *GPU],
        ["weights.pause=in_place"],
        [*NGRAM, "placement.mode=colocate", "weights.check=checksum"],
        [*NGRAM, *ADAPTERS],
        [*EAGLE, "placement.mode=colocate", "sampler.sglang.enable_draft_weights_cpu_backup=true"],
        ["sampler.sglang.speculative_algorithm=DFLASH", "sampler.backend=embedded"],
        CUT,
        [*CUT, "sampler.backend=sglang", "sampler.top_k=50"],
        [*ENGINE, "algo.kl_coef=0.1"],
        [*ENGINE, *GPU, "sampler.top_k=50"],
        CENTERED,
        [*CENTERED, "algo.old_logprobs=learner", "algo.correction.rollout_is=token"],
        [*ADAPTERS, *GPU, "placement.mode=disaggregate", "sampler.sglang={tp_size: 2}"],
    ],
)
def test_ways_that_are_open(settings: list[str]) -> None:
    load_config(None, settings)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["sampler.url=','"], r"sampler\.url=',' holds no address"),
        (["sampler.url='http://a:1,http://a:1'"], "names an engine twice"),
        (["sampler.url=http://a:1", "sampler.engines=2"], r"leave out sampler\.engines"),
        (["sampler.url=http://a:1", "sampler.keep_minutes=5"], r"sampler\.keep_minutes=5: running engines .* stay"),
        (["weights.adapters=only", "learner.lora={}", "sampler.keep_minutes=5"], r"leave out sampler\.keep_minutes"),
        (["sampler.port=65535", "sampler.engines=2"], r"lower sampler\.port"),
        (["sampler.top_p=0.9"], r"sampler\.renormalise=engine or learner, or .*sampler\.allow_unnormalised=true"),
        ([*CUT, "sampler.allow_unnormalised=true"], "leave out one of the two"),
        ([*CUT, "sampler.top_p=1"], "sampling keeps all tokens"),
        ([*CUT, "algo.old_logprobs=sampler"], r"set algo\.old_logprobs=learner"),
        ([*CUT, "algo.correction.rollout_is=token"], r"set algo\.correction\.rollout_is=none"),
        ([*CUT, "algo.kl_coef=0.1"], r"set algo\.kl_coef=0"),
        ([*ENGINE, "algo.distillation.teachers.t.url=http://a:1"], "teachers: they score the whole distribution"),
        ([*ENGINE, *GPU], r"sampler\.top_k=-1: .* set sampler\.top_k from 2 to .*sampling_mask_max_tokens=4096"),
        ([*ENGINE, *GPU, "sampler.top_k=8", "sampler.sglang.sampling-mask-max-tokens=4"], "from 2 to .*=4"),
        ([*ENGINE, *GPU, "sampler.top_k=8", "sampler.router=sglang"], r"set sampler\.router=builtin"),
        ([*ENGINE, *NGRAM, "sampler.top_k=8"], r"no sampling support of drafts; .*sampler\.renormalise=learner"),
        (["algo.score_centering=true", "algo.loss.name=reinforce"], r"set sampler\.renormalise=engine with"),
        ([*ENGINE, "algo.score_centering=true"], r"algo\.loss\.name=ppo_clip: .* set algo\.loss\.name=reinforce"),
        ([*CENTERED, "algo.correction.rollout_is=sequence"], r"set algo\.correction\.rollout_is=token or none"),
        ([*CENTERED, "algo.correction.rollout_rs=[token_k1]"], "leave out rollout_is_batch_normalize, rollout_rs"),
        (
            [*INVARIANT[1:]],
            r"learner\.batch_invariant=true without sampler\.embedded\.batch_invariant=true: .* set both",
        ),
        ([*INVARIANT, "sampler.embedded.dtype=bfloat16"], r"set sampler\.embedded\.dtype=float32"),
        ([*INVARIANT, *GPU], r"set sampler\.backend=embedded"),
        ([*INVARIANT, "learner.precision=auto"], r"set learner\.precision=float32"),
        ([*INVARIANT, "learner.device=auto"], r"set learner\.device=cpu"),
        ([*INVARIANT, "learner.threads=2"], r"set learner\.threads=1"),
        ([*INVARIANT, "learner.lora={}"], "engines have merged weights"),
        ([*INVARIANT, "learner.backend=megatron"], r"set learner\.backend=fsdp"),
        (["data.path=rows.jsonl", "tasks.name=multihop"], r"data\.path=rows\.jsonl and tasks\.name=multihop"),
        (["eval.split=x", "eval.path=y"], r"eval\.split=x and eval\.path=y"),
        (
            ["rollout.filter_groups.filters=[zero_variance]", "rollout.n_samples_per_prompt=1"],
            "every group would be dropped",
        ),
        (["reward.key=score"], r"reward\.key=score is set, but no reward\.function"),
        (["sft.steps=2", "sft.curriculum=[{steps: 3}]"], r"sft\.steps=2, but .* 3 steps"),
    ],
)
def test_keys_that_contradict_each_other(settings: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, settings)


def test_every_violated_rule_has_a_line_those_of_algorithm_environment_and_transport_too() -> None:
    settings = ["sampler.top_p=0.9", "reward.key=score", "weights.adapters=only"]
    settings += ["algo.loss.name=gpso", "sources.a.env.name=search_r2", "weights.transport=ipc"]
    with pytest.raises(ConfigError) as refusal:
        load_run(build_parser("train").parse_args(["train", "--config", "search_r1/cpu", *settings]))
    lines = str(refusal.value).splitlines()
    assert [line.split("=")[0].split(". ")[0] for line in lines] == [
        "reward.key",
        "sampler.top_p",
        "weights.adapters",
        "weights.adapters",
        "unknown loss 'gpso' (algo.loss.name)",
        "unknown environment 'search_r2' (sources.a.env.name)",
        "weights.transport",
    ]


@pytest.mark.parametrize(
    ("overrides", "positions", "fits"),
    [
        (["sampler.backend=sglang", "rollout.max_tokens=506"], 512, True),
        (["sampler.backend=sglang", "rollout.max_tokens=507"], 512, False),
        (["sampler.backend=sglang", "rollout.max_tokens=507", "sampler.sglang.context_length=1024"], 512, True),
        (["sampler.backend=sglang", "rollout.max_tokens=507", "sampler.sglang.context-length=512"], None, False),
        (["sampler.backend=sglang", "rollout.max_tokens=4096"], None, True),
        (["sampler.backend=sglang", "rollout.max_tokens=4096", "sampler.url=http://127.0.0.1:1"], 512, True),
        (["rollout.max_tokens=512"], 512, True),
        (["rollout.max_tokens=513"], 512, False),
    ],
)
def test_an_episode_fits_the_models_context(overrides: list[str], positions: int | None, *, fits: bool) -> None:
    config = load_config(None, overrides)
    if fits:
        check_context(config, positions)
    else:
        with pytest.raises(ConfigError, match=r"rollout\.max_tokens=\d+ is more than the \d+ tokens"):
            check_context(config, positions)
