"""The reward functions that come with agentrl."""

import pytest

from agentrl.core.registry import REWARDS, names
from agentrl.rewards import Sample, builtin


def score(name, rollout):
    return getattr(builtin, name)(Sample.from_rollout(rollout))


@pytest.mark.parametrize(
    ("label", "words"), [("3.5", "joins different numbers"), (-5, "joins"), ("A", "leaves nothing"), ("Rome", "")]
)
def test_the_norm_of_squad_warns_once_of_labels_that_it_changes(rollout, caplog, label, words):
    builtin._warn_once.cache_clear()
    for _ in range(3):
        score("squad_exact_match", rollout("x", label=label))
        score("squad_f1", rollout("x", label=label))
    assert len(caplog.messages) == bool(words)
    assert words in caplog.text


def test_they_are_registered_like_anybodys():
    assert {"exact_match", "f1", "numeric", "math"} <= set(names(REWARDS))


@pytest.mark.parametrize(
    ("name", "text", "label", "expected"),
    [
        ("exact_match", "<think>Rome?</think> <answer>The Paris!</answer>", ["Lutetia", "Paris"], 1.0),
        ("exact_match", "Paris it is", "Paris", 0.0),
        ("exact_match", "4", 4, 1.0),
        ("f1", "Paris it is", "Paris", 0.5),
        ("numeric", "2 + 2 = 4, so $4.00.", "#### 4", 1.0),
        ("numeric", "4 or 5", 4, 0.0),
        ("exact_match", "3.5", "35", 0.0),
        ("squad_exact_match", "The U.S.!", "US", 1.0),
        ("squad_exact_match", "3.5", "35", 1.0),
        ("squad_f1", "-5 of 3.5", "5 35", 0.8),
        ("numeric", "50%", 0.5, 1.0),
        ("math", r"\boxed{4\%}", "0.04", 1.0),
        ("math", r"\boxed{4\%}", "4", 0.0),
        ("numeric", "no idea", "4", 0.0),
        ("math", r"so \boxed{\frac{1}{2}}", "$0.5$", 1.0),
        ("math", r"\boxed{3}", [r"the result is \boxed{4}", "3"], 1.0),
        ("math", "4", "4", 0.0),
        ("math", r"\boxed{}", "4", 0.0),
    ],
)
def test_scores(rollout, name, text, label, expected):
    assert score(name, rollout(text, label=label)) == expected


@pytest.mark.parametrize("name", ["exact_match", "f1", "numeric"])
def test_only_the_policys_own_last_turn_counts(rollout, name):
    episode = rollout("4", "I do not know", label="4")
    episode.turns[0].observation = "<answer>4</answer>"
    episode.turns[1].observation = "4"
    assert score(name, episode) == 0.0
    assert score(name, rollout(label="4")) == 0.0


@pytest.mark.parametrize("name", ["exact_match", "f1", "numeric", "math"])
@pytest.mark.parametrize("label", [None, [], "", {"a": 1}, [None], True])
def test_a_label_that_cannot_be_compared_with(rollout, name, label):
    with pytest.raises(ValueError, match=r"label of train\.jsonl:1 is .*data\.label_key"):
        score(name, rollout("4", label=label))


def test_a_label_without_a_number(rollout):
    with pytest.raises(ValueError, match=r"no number in 'four', the label of train\.jsonl:1"):
        score("numeric", rollout("4", label="four"))


def test_a_sample_tells_what_was_sampled_from_what_was_heard(rollout):
    made = rollout("a", "b")
    sample = Sample.from_rollout(made)
    assert (sample.prompt, sample.response, sample.final) == ("<user>2 + 2?<assistant>", "a[heard]b", "b")
    assert (sample.label, sample.metadata, sample.prompt_id, sample.rollout_id) == (
        "4",
        {"hops": 2},
        "train.jsonl:1",
        "1/0/0",
    )
    assert sample.rollout is made
    assert sample.turns == tuple(made.turns)
