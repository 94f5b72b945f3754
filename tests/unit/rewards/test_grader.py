"""Reward functions as users write them: what they get, what may come back, what follows a fault."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from agentrl import Sample
from agentrl.config.load import load_config
from agentrl.config.rewards import RewardConfig
from agentrl.core.errors import ConfigError, RunStopped, UnknownNameError
from agentrl.core.types import FailureKind
from agentrl.rewards.functions import THREADS, FunctionRunner, takes_group
from agentrl.rewards.grader import RewardGrader, check_reward, make_grader

HEAD = "import asyncio, math, sys, threading, time\nfrom agentrl import Sample\nfrom collections.abc import Sequence\n"


@pytest.fixture
def grader(tmp_path: Path):
    def make(body: str, **options) -> RewardGrader:
        file = tmp_path / "my_rewards.py"
        file.write_text(HEAD + body)
        made = make_grader(RewardConfig(function=f"{file}:score", **options))
        assert made is not None
        return made

    return make


def grade(made, *rollouts):
    asyncio.run(made.grade(list(rollouts)))
    return [rollout.reward for rollout in rollouts]


@pytest.mark.parametrize(
    "body",
    [
        "def score(sample): return float(sample.final == sample.label)",
        "async def score(sample: Sample) -> float:\n    await asyncio.sleep(0)\n    return float(sample.final == '4')",
        "def score(samples): return [s.final == s.label for s in samples]",
        "async def score(group: list[Sample]): return [int(s.final == s.label) for s in group]",
        "def score(group: 'Sequence[Sample]', bonus=0): return tuple(float(s.final == s.label) for s in group)",
        "class Score:\n    def __call__(self, sample): return float(sample.final == '4')\nscore = Score()",
        "class Score:\n    async def __call__(self, sample): return float(sample.final == '4')\nscore = Score()",
        "async def later(sample): return float(sample.final == '4')\nscore = lambda sample: later(sample)",
        "def score(sample): return float(sample.final == '4' and threading.current_thread().name == 'reward')",
    ],
)
def test_plain_and_async_for_a_sample_or_a_group(grader, rollout, body):
    assert grade(grader(body), rollout("4"), rollout("5", name="1")) == [1.0, 0.0]


@pytest.mark.parametrize(
    "value", ["True", "1", "__import__('numpy').float32(1)", "__import__('fractions').Fraction(1)"]
)
def test_anything_that_is_a_number(grader, rollout, value):
    assert grade(grader(f"def score(sample): return {value}"), rollout("4")) == [1.0]


def test_arrays_of_a_group(grader, rollout):
    body = "import numpy as np\ndef score(samples): return np.arange(len(samples)) / 2"
    assert grade(grader(body), *(rollout("4", name=str(index)) for index in range(3))) == [0.0, 0.5, 1.0]


def test_a_mapping_gives_the_reward_and_metrics(grader, rollout):
    body = "def score(sample): return {'score': 1, 'exact_match': True, 'turns': 3.0, 'value': 'yes'}"
    sample = rollout("4")
    assert grade(grader(body, key="score"), sample) == [1.0]
    assert sample.metrics == {"turns": 3.0, "exact_match": 1.0}
    assert sample.failure is None


FAULTS = {
    "def score(sample): raise KeyError('label')": r"KeyError: 'label' \(my_rewards\.py:4\)",
    "async def score(sample): raise KeyError('label')": r"KeyError: 'label' \(my_rewards\.py:4\)",
    "def score(sample): sys.exit(3)": "SystemExit: 3",
    "def score(sample): raise StopIteration": "StopIteration",
    "def score(sample): return math.nan": "it returned nan, which is not finite",
    "def score(sample): return -math.inf": "it returned -inf, which is not finite",
    "def score(sample): return '1'": "it returned '1', which is not a number",
    "def score(sample): return None": "it returned None, which is not a number",
    "def score(sample): return {'a': 1, 'b': 2}": "the keys a, b; set reward.key",
    "def score(samples): return 1.0": "must return a list of as many rewards, not 1.0",
    "def score(samples): return [1.0, 2.0]": "it got 1 samples and returned 2 rewards",
    "def score(samples): return [None]": "it returned None, which is not a number",
    "def score(sample): time.sleep(9)": "TimeoutError: it took longer than reward.timeout_s=0.2",
    "async def score(sample): await asyncio.sleep(9)": "TimeoutError: it took longer than reward.timeout_s=0.2",
    "def score(sample): raise TimeoutError('the server is slow')": "TimeoutError: the server is slow",
}


@pytest.mark.parametrize(("body", "message"), FAULTS.items(), ids=range(len(FAULTS)))
def test_a_fault_stops_the_run_with_sample_and_exception(grader, rollout, body, message):
    start = time.monotonic()
    with pytest.raises(RunStopped, match=message) as stop:
        grade(grader(body, timeout_s=0.2), rollout("It is " + "4" * 1000))
    message = str(stop.value)
    assert "my_rewards.py:score failed" in message
    assert "1/0/0 of task train.jsonl:1" in message
    assert "2 + 2?" in message
    assert "It is 444" in message
    assert len(message) < 1600, "a long response is cut"
    assert "reward.on_error=drop" in message
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(("body", "message"), FAULTS.items(), ids=range(len(FAULTS)))
@pytest.mark.parametrize(("on_error", "reward", "dropped"), [("drop", 0.25, True), ("score", -1.0, False)])
def test_or_drops_or_scores_the_sample(grader, rollout, body, message, on_error, reward, dropped):
    sample = rollout("5")
    made = grader(body, timeout_s=0.2, on_error=on_error, error_score=-1)
    assert grade(made, sample) == [reward]
    assert sample.dropped is dropped
    assert sample.failure is not None
    assert sample.failure.kind is FailureKind.REWARD
    assert "my_rewards.py:score: " in sample.failure.message


def test_a_fault_concerns_only_the_sample_it_is_of(grader, rollout):
    body = "def score(samples): return [math.nan if s.final == '5' else 1.0 for s in samples]"
    first_sample, other_rollout = rollout("4"), rollout("5", name="1")
    assert grade(grader(body, on_error="drop"), first_sample, other_rollout) == [1.0, 0.25]
    assert (first_sample.dropped, other_rollout.dropped) == (False, True)
    body = "def score(sample): return 1 / (sample.final == '4')"
    first_sample, other_rollout = rollout("4"), rollout("5", name="1")
    assert grade(grader(body, on_error="score"), other_rollout, first_sample) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("body", "key", "message"),
    [
        ("{'acc': 1, 'len': 2}", "score", "the keys acc, len, and no 'score'; change reward.key=score"),
        ("{'acc': float('nan')}", "acc", "its 'acc' is nan"),
        ("{'acc': 'high'}", "acc", "its 'acc' is 'high', which is not a number"),
        ("{'acc': 1, 'len': float('inf')}", "acc", "its 'len' is inf"),
        ("{}", "acc", "the keys none"),
    ],
)
def test_a_mapping_that_does_not_fit(grader, rollout, body, key, message):
    with pytest.raises(RunStopped, match=message):
        grade(grader(f"def score(sample): return {body}", key=key), rollout("4"))


def test_a_late_thread_takes_no_place_from_later_calls():
    block = threading.Event()
    call = FunctionRunner(lambda sample: block.wait(30) if sample == "slow" else 1.0, "f", 0.1)

    async def main():
        slow = [call(["slow"]) for _ in range(2 * THREADS)]
        results = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(result, TimeoutError) for result in results)
        assert await call(["quick"]) == 1.0

    try:
        asyncio.run(main())
    finally:
        block.set()


def test_plain_functions_run_beside_each_other():
    meeting = threading.Barrier(THREADS, timeout=20)

    async def main():
        return await asyncio.gather(*(call([index]) for index in range(THREADS)))

    call = FunctionRunner(lambda sample: meeting.wait() >= 0, "f", 30)
    assert asyncio.run(main()) == [True] * THREADS


def test_what_counts_as_a_group():
    def named(samples): ...
    def annotated(x: list[Sample]): ...
    def sequence(x: Sequence[Sample]): ...
    def one(sample: Sample): ...
    def bare(x, weight=1.0): ...

    assert [takes_group(f, "f") for f in (named, annotated, sequence, one, bare)] == [True, True, True, False, False]


@pytest.mark.parametrize("body", ["def score(): ...", "def score(a, b): ...", "def score(sample, *, extra): ..."])
def test_a_function_must_take_one_argument(grader, body):
    with pytest.raises(ConfigError, match=r"reward\.function=.*takes one argument"):
        grader(body)


def test_checks_before_a_run(tmp_path: Path):
    assert make_grader(RewardConfig()) is None
    config = load_config(None, ["env.name=single_turn"])
    check_reward(config, needs_reward=False)
    with pytest.raises(ConfigError, match=r"reward\.function.*exact_match, f1, gpqa, ifbench, math, numeric"):
        check_reward(config, needs_reward=True)
    with pytest.raises(UnknownNameError, match=r"Did you mean 'exact_match'.*file\.py:function"):
        check_reward(load_config(None, ["reward=exact_matc"]), needs_reward=True)
    with pytest.raises(ConfigError, match=r"set data\.label_key"):
        check_reward(load_config(None, ["reward=f1", "data.path=x.jsonl"]), needs_reward=True)
    with pytest.raises(ConfigError, match=r"reward\.key=x is set, but no reward\.function"):
        check_reward(load_config(None, ["reward.key=x"]), needs_reward=False)
    (tmp_path / "r.py").write_text("score = 3")
    with pytest.raises(ConfigError, match="is a int, and no function"):
        check_reward(load_config(None, [f"reward={tmp_path}/r.py:score"]), needs_reward=True)


def test_numpy_scalars_are_numbers(grader, rollout):
    assert np.float32(1.0) == grade(grader("import numpy\ndef score(s): return numpy.array(1.0)"), rollout("4"))[0]
