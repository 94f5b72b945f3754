"""What a training run shows of its evaluations."""

from agentrl.config.load import load_config
from agentrl.train.run_outputs import curve_keys, is_main_metric


def test_the_curve_shows_every_set() -> None:
    assert "eval/exact_match" in curve_keys(load_config(None))
    keys = curve_keys(load_config(None, ["eval.sets={a: {}, b: {}}"]))
    assert {"train/reward", "eval/a/reward", "eval/b/exact_match"} <= set(keys)
    assert "eval/reward" not in keys
    assert {"train/a/reward", "eval/a/reward"} <= set(curve_keys(load_config(None, ["sources.a={}"])))


def test_the_end_of_a_run_says_what_matters() -> None:
    shown = ["eval/reward", "eval/a/pass@4", "eval/exact_match/hops=2", "eval/a/reward/hops=1", "time/eval_s"]
    hidden = ["eval/reward/ci95", "eval/a/pass@4/ci95", "eval/searches/hops=2"]
    assert [key for key in shown + hidden if is_main_metric(key)] == shown
