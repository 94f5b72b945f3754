"""Groups of engines: their options over the common ones, and groups that are refused."""

from __future__ import annotations

import pytest

from agentrl.cluster import placement_layout as placing
from agentrl.cluster.placement_layout import check_placement, describe_placement, lay_out, number_by_machine
from agentrl.config.engine_checks import check_placement as check_placement_keys
from agentrl.config.engine_groups import (
    evaluation_group,
    gpus_before,
    group_sampler,
    other_model_sampler,
    saved_policy_sampler,
    training_engines,
    training_gpus,
)
from agentrl.config.judges import judge_configs, judge_sampler
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError, MissingError
from agentrl.launch.job import run_gpus
from agentrl.weight_sync.registry import transport_faults

SGLANG = "sampler.backend=sglang"
BACKGROUND = "eval.background=true"
JUDGE = ["reward.function=judge", "reward.judge.model=j"]


def evaluation(options: str = "") -> list[str]:
    return [BACKGROUND, f"sampler.groups.eval={{serves: evaluation{options}}}"]


def test_options_of_a_group_replace_the_common_ones_in_any_spelling() -> None:
    common = "sampler.sglang={tp: 4, mem-fraction-static: 0.8, python: /p, dtype: bfloat16}"
    config = load_config(
        None,
        [
            SGLANG,
            common,
            *evaluation(", engines: 3, sglang: {tensor_parallel_size: 2, mem_fraction_static: 0.5, dtype: null}"),
        ],
    )
    sampler = group_sampler(config.sampler, "eval")
    own = {"tensor_parallel_size": 2, "mem_fraction_static": 0.5, "dtype": None}
    assert sampler.sglang == {"python": "/p", **own}
    assert (sampler.engines, sampler.engine_ranks, sampler.memory_share, sampler.groups) == (3, 2, 0.5, {})
    assert (config.sampler.engine_ranks, config.sampler.memory_share) == (4, 0.8)


def test_engines_of_other_models_have_no_option_about_the_policys() -> None:
    policy = "load_format: dummy, context-length: 4096, speculative_algorithm: NGRAM, speculative_num_draft_tokens: 4"
    common = "tp_size: 4, mem-fraction-static: 0.8, python: /p, dtype: bfloat16"
    judge = "reward.judge={model: a/b, sglang: {tp: 1, context_length: 99}}"
    config = load_config(None, [SGLANG, f"sampler.sglang={{{policy}, {common}}}", "reward.function=judge", judge])
    sampler = other_model_sampler(config.sampler)
    assert sampler.sglang == {"tp_size": 4, "mem-fraction-static": 0.8, "python": "/p", "dtype": "bfloat16"}
    (judge_config,) = judge_configs(config).values()
    without_size = {name: value for name, value in sampler.sglang.items() if name != "tp_size"}
    assert judge_sampler(config, judge_config).sglang == without_size | {"tp": 1, "context_length": 99}
    saved = saved_policy_sampler(config.sampler)
    assert set(config.sampler.sglang) - set(saved.sglang) == {"load_format"}
    assert saved_policy_sampler(saved) == saved


def test_options_of_the_embedded_engine_that_a_group_does_not_set_are_the_common_ones() -> None:
    words = ["sampler.embedded={slots: 5, context: 77}", *evaluation(", embedded: {slots: 9}")]
    config = load_config(None, words)
    read_back = type(config).model_validate(config.model_dump())
    for each in (config, read_back):
        group = evaluation_group(each.sampler)
        assert group is not None
        assert (group[1].embedded.slots, group[1].embedded.context) == (9, 77)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["sampler.groups.eval.serves=evaluation"], r"groups\.eval\.serves=evaluation without eval\.background"),
        (
            ["sampler.groups={a: {serves: evaluation}, b: {serves: evaluation}}", BACKGROUND],
            r"has 2 groups .* \(a, b\)",
        ),
        (["sampler.groups={a.b: {serves: evaluation}}", BACKGROUND], r"the group's name 'a\.b'"),
        (["sampler.groups.a.serves=training"], r"sampler\.groups\.a\.serves='training'"),
        (evaluation(", sglang: {tp_size: 2}"), r"groups\.eval\.sglang is set, and sampler\.backend=embedded"),
        (
            [SGLANG, *evaluation(", embedded: {slots: 2}")],
            r"groups\.eval\.embedded is set, and sampler\.backend=sglang",
        ),
        ([SGLANG, *evaluation(", sglang: {tp_size: two}")], r"sampler\.groups\.eval\.sglang: tp_size='two'"),
        (
            [SGLANG, "sampler.sglang.mem-fraction-static=high"],
            r"sampler\.sglang\.mem_fraction_static='high': .* between 0 and 1",
        ),
        (
            [SGLANG, *evaluation(", sglang: {mem_fraction_static: 1.5}")],
            r"groups\.eval\.sglang: mem_fraction_static=1\.5",
        ),
        ([SGLANG, "sampler.sglang.nnodes=0"], r"sampler\.sglang\.nnodes=0: SGLang takes a whole number from 1 on"),
        ([SGLANG, *JUDGE, "reward.judge.sglang={tp_size: two}"], r"reward\.judge\.sglang: tp_size='two'"),
        ([SGLANG, *JUDGE, "reward.judge.sglang={mem_fraction_static: 0}"], r"judge\.sglang: mem_fraction_static=0"),
        ([SGLANG, *evaluation(", sglang: {python: /p}")], r"one interpreter runs .* set sampler\.sglang\.python"),
        (evaluation(", embedded: {slots: 0}"), r"sampler\.groups\.eval\.embedded\.slots=0"),
    ],
)
def test_groups_that_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, settings)


@pytest.mark.parametrize(
    ("options", "mode", "words"),
    [
        (", sglang: {tp_size: 4, nnodes: 3}", "disaggregate", r"groups\.eval: nnodes=3 does not divide the 4 GPUs"),
        (", sglang: {tp_size: 4, nnodes: 2}", "separate", r"groups\.eval: nnodes=2 with placement\.mode=separate"),
        (", sglang: {device: cpu}", "disaggregate", r"groups\.eval\.sglang\.device=cpu, and other engines are on cuda"),
    ],
)
def test_groups_that_cannot_be_placed(options: str, mode: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_placement_keys(load_config(None, [SGLANG, f"placement.mode={mode}", *evaluation(options)]), "cuda")


@pytest.mark.parametrize("mode", ["colocate", "disaggregate"])
def test_engines_that_only_evaluate_have_the_last_bundles(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [SGLANG, "learner.ranks=2", f"placement.mode={mode}", "learner.device=cuda"]
    monkeypatch.setattr(placing, "learner_device", lambda learner: "cuda")
    words += evaluation(", engines: 2, sglang: {tp_size: 4, nnodes: 2}")
    config = load_config(None, words)
    layout = lay_out(config, "cuda")
    first = 2 if mode == "colocate" else 3  # bundles of ranks and of the engine of training
    assert layout.evaluation == ((first, first + 1), (first + 2, first + 3))
    assert (layout.bundles[first:], layout.evaluation_needs) == (({"GPU": 2},) * 4, {"GPU": 2})
    assert layout.total["GPU"] == run_gpus(config) == first + 8
    assert describe_placement(config).endswith(", and 8 for evaluation (sampler.groups)")
    monkeypatch.setattr(placing, "gpus_here", lambda: 8)
    with pytest.raises(MissingError, match=rf"wants {first + 8} GPUs .*, and 8 for evaluation .* there are 8 here"):
        check_placement(config)


def test_a_run_on_one_machine_counts_them() -> None:
    words = [SGLANG, "learner.ranks=2", "learner.device=cuda", *evaluation(", engines: 2, sglang: {tp_size: 2}")]
    assert run_gpus(load_config(None, words)) == 2 + 1 + 4


def test_colocated_engines_evaluate_in_the_background_only_with_engines_of_their_own() -> None:
    colocated = ["placement.mode=colocate", "learner.device=cpu"]
    check_placement_keys(load_config(None, [*colocated, *evaluation()]), "cpu")
    with pytest.raises(ConfigError, match=r"or give evaluation engines of its own: sampler\.groups\.eval\.serves"):
        check_placement_keys(load_config(None, [*colocated, BACKGROUND]), "cpu")


APART = [
    SGLANG,
    "sampler.router=sglang",
    "weights.gap_limit=off",
    "sampler.sglang={tp_size: 2}",
    "sampler.groups={answers: {serves: decode, engines: 2}, prompts: {serves: prefill, engines: 2, sglang: {tp_size: 4}}}",
]


def test_engines_for_prefill_come_first_with_the_sizes_of_their_groups() -> None:
    sampler = load_config(None, APART).sampler
    assert (training_engines(sampler), training_gpus(sampler)) == (4, 12)
    assert [gpus_before(sampler, number) for number in range(4)] == [0, 4, 8, 10]
    assert run_gpus(load_config(None, [*APART, "learner.ranks=3", "learner.device=cuda"])) == 15


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["sampler.groups.answers.serves=prefill"], r"serves=prefill and no decode"),
        (["sampler.groups.prompts.serves=decode"], r"serves=decode and no prefill"),
        (["sampler.backend=embedded"], r"sampler\.backend=embedded: that engine does both"),
        (["sampler.sglang.device=cpu"], r"sampler\.sglang\.device=cpu"),
        (["sampler.router=builtin"], r"it sends a request to one engine; set sampler\.router=sglang"),
        (["sampler.url=http://a"], r"sampler\.url=http://a: running engines are in no group"),
        (["sampler.engines=2"], r"sampler\.engines=2: engines of training are those of groups"),
        (["sampler.keep_minutes=1"], r"engines of groups are not kept"),
        (["placement.mode=colocate"], r"placement\.mode=colocate: engines send each other memory"),
        (["weights.pause=retract"], r"weights\.pause=retract: .* set weights\.pause=abort, restart or finish"),
        (["weights.pause=in_place"], r"weights\.pause=in_place"),
        (["weights.prefix_cache=keep"], r"weights\.prefix_cache=keep: ages of cached tokens"),
        (["weights.gap_limit=auto"], r"set weights\.gap_limit=off"),
        (["sampler.sglang.speculative_algorithm=NGRAM"], r"speculative_algorithm=NGRAM was not checked"),
        (["weights.check=checksum"], r"weights\.check=checksum: an engine with several ranks"),
    ],
)
def test_prefill_and_decode_are_refused_where_they_cannot_work(settings: list[str], words: str) -> None:
    load_config(None, APART)
    with pytest.raises(ConfigError, match=words):
        load_config(None, [*APART, *settings])


def test_transports_reach_the_engines_of_all_groups_or_are_refused() -> None:
    words = [*APART, "placement.mode=disaggregate", "learner.device=cuda", "weights.transport=distributed"]
    assert not transport_faults(load_config(None, words))
    [fault] = transport_faults(load_config(None, [*words, "sampler.groups.prompts.sglang.pp_size=2"]))
    assert "reaches SGLang's tensor parallel ranks only" in fault


def test_engines_of_two_sizes_have_bundles_of_their_sizes_and_are_numbered_machine_by_machine() -> None:
    config = load_config(None, [*APART, "learner.ranks=2", "placement.mode=disaggregate", *evaluation()])
    layout = lay_out(config, "cuda")
    assert [bundle["GPU"] for bundle in layout.bundles] == [1, 1, 4, 4, 2, 2, 2]
    assert (layout.engines, layout.evaluation) == (((2,), (3,), (4,), (5,)), ((6,),))
    assert describe_placement(config) == (
        "disaggregate: 2 for the learner, and engines: 2 of 4 for prompts, 2 of 2 for answers, and 2 for evaluation "
        "(sampler.groups)"
    )
    machines = dict(enumerate(["learner", "learner", "b", "a", "b", "a", "b"]))
    numbered = number_by_machine(layout, machines | {0: "a", 1: "a"})
    assert numbered.engines == ((3,), (2,), (5,), (4,)), "only bundles of the same size are exchanged"
    assert (numbered.ranks, numbered.evaluation) == ((0, 1), ((6,),))
