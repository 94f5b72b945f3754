"""Which answers every built-in reward must keep apart, and which it must take for equal.

A row is a relation: the rewards that it is about, and pairs of a label and an answer.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrl.core.registry import REWARDS, names, reward_function
from agentrl.core.types import Rollout
from agentrl.rewards import Sample

Pairs = st.SearchStrategy[tuple[str, str]]
TEXT, NUMBERS = ("exact_match", "f1"), ("numeric", "math")
ALL, NO_NUMERIC = (*TEXT, *NUMBERS), (*TEXT, "math")
WHOLE = st.integers(1, 10**6)
DIGIT = st.integers(1, 9)
LETTER = st.sampled_from("ABCDEFGH")
WORD = st.text("bcdefghijklmnop", min_size=5, max_size=9)
TWO = st.lists(st.integers(-20, 20), min_size=2, max_size=2, unique=True)


def pairs(values: st.SearchStrategy[Any], label: Callable[[Any], str], answer: Callable[[Any], str]) -> Pairs:
    return values.map(lambda value: (label(value), answer(value)))


def brackets(kinds: str) -> Pairs:
    """Pairs of intervals with other ends, or of a set and an interval."""
    shapes = [r"\{%s\}", "(%s)"] if kinds == "set" else ["(%s)", "[%s]", "(%s]", "[%s)"]
    both = st.sampled_from(list(itertools.permutations(shapes, 2)))
    return st.tuples(both, TWO).map(
        lambda drawn: tuple(shape % "{}, {}".format(*sorted(drawn[1])) for shape in drawn[0])
    )


DIFFERENT: dict[str, tuple[tuple[str, ...], Pairs]] = {
    "other numbers": (ALL, pairs(WHOLE, str, lambda n: str(n + 1))),
    "signs": (ALL, pairs(WHOLE, str, lambda n: f"-{n}")),
    "decimal points": (ALL, pairs(st.tuples(WHOLE, DIGIT), "{0[0]}.{0[1]}".format, "{0[0]}{0[1]}".format)),
    "zeros after the point": (ALL, pairs(WHOLE, "{}.0".format, "{}0".format)),
    "separators": (ALL, pairs(st.integers(1001, 9999), "{:,}".format, lambda n: f"{n:,}".replace(",", "."))),
    "percent and number": (ALL, pairs(WHOLE, str, "{}%".format)),
    "inverse fractions": (
        ALL,
        pairs(st.tuples(DIGIT, st.integers(10, 99)), "{0[0]}/{0[1]}".format, "{0[1]}/{0[0]}".format),
    ),
    "digits of other scripts": (
        ALL,
        pairs(WHOLE, str, lambda n: str(n).translate({48 + i: 0x660 + i for i in range(10)})),
    ),
    "choices": (NO_NUMERIC, st.lists(LETTER, min_size=2, max_size=2, unique=True).map(tuple)),
    "words of the same letters": (
        NO_NUMERIC,
        pairs(WORD.filter(lambda word: word != word[::-1]), str, lambda word: word[::-1]),
    ),
    "words and numbers": (
        NO_NUMERIC,
        pairs(WORD.filter(lambda word: word != word[::-1]), "{} 66".format, lambda word: f"{word[::-1]} 66"),
    ),
    "units": (
        NO_NUMERIC,
        st.tuples(WHOLE, st.permutations(["cm", "m", "km", "kg", "s"])).map(
            lambda drawn: (f"{drawn[0]} {drawn[1][0]}", f"{drawn[0]} {drawn[1][1]}")
        ),
    ),
    "ends of intervals": (NO_NUMERIC, brackets("interval")),
    "sets and intervals": (NO_NUMERIC, brackets("set")),
    "order of a pair": (NO_NUMERIC, pairs(TWO, "({0[0]}, {0[1]})".format, "({0[1]}, {0[0]})".format)),
    "members of sets": (NO_NUMERIC, pairs(TWO, r"\{{{0[0]}, 99\}}".format, r"\{{{0[1]}, 99\}}".format)),
    "powers and products": (NO_NUMERIC, pairs(st.integers(2, 9), "x^{}".format, "x{}".format)),
    "bases": (NO_NUMERIC, pairs(st.integers(10, 77), "{}_8".format, str)),
    "names with one letter": (TEXT, pairs(LETTER, "vitamin {}".format, lambda letter: "vitamin")),
    "names with signs": (TEXT, st.permutations(["C", "C++", "C#", "C--"]).map(lambda order: (order[0], order[1]))),
    "times": (TEXT, pairs(st.integers(10, 23), "{}:30".format, "{}30".format)),
    "powers of a number": (ALL, pairs(st.integers(2, 9), str, "{}²".format)),
    "thousands and millions": (NUMBERS, pairs(WHOLE, str, r"{}\text{{ million}}".format)),
    "small numbers": (NUMBERS, pairs(DIGIT, "0.0000000{}".format, "0.0000000{}1".format)),
    "large fractions": (NUMBERS, pairs(st.integers(10**8, 10**9), str, "{} 1/7".format)),
    "fractions of a character": (ALL, pairs(DIGIT, "{}".format, "{}½".format)),
    "numbers with another sign": (("numeric",), pairs(WHOLE, str, "negative {}".format)),
    "percent of a variable": (("math",), pairs(WHOLE, str, "x = {}%".format)),
    "a number and alternatives": (
        ("math",),
        pairs(
            st.tuples(
                WHOLE,
                st.sampled_from(
                    [r"{}\lor {}", r"{} \vee {}", "{} | {}", r"{} \to {}", r"{}\land{}", r"{1}\text{{ (or {0})}}"]
                ),
            ),
            "{0[0]}".format,
            lambda n: n[1].format(n[0] - 1, n[0]),
        ),
    ),
    "a number and a relation": (
        ("math",),
        pairs(
            st.tuples(WHOLE, st.sampled_from([r"\ne {}", r"\geq {}", "≠{}", r"\le {}"])),
            "{0[0]}".format,
            lambda n: n[1].format(n[0]),
        ),
    ),
    "currencies": (("math",), pairs(WHOLE, r"\${}".format, "{} cents".format)),
    "degrees and radians": (("math",), pairs(WHOLE, r"{}^\circ".format, "{} rad".format)),
    "speeds": (("math",), pairs(WHOLE, r"{}\text{{ km/h}}".format, r"{}\text{{ m/s}}".format)),
    "halves of a day": (("math",), pairs(st.integers(1, 12), "{}:00 am".format, "{}:00 pm".format)),
    "dates of one difference": (NO_NUMERIC, pairs(st.integers(2, 9), "2023-01-0{}".format, "2023-0{}-01".format)),
    "no and on": (NO_NUMERIC, st.just(("no", "on"))),
    "factorials": (NO_NUMERIC, pairs(st.integers(3, 9), str, "{}!".format)),
}
"""These must not be equal: exact match 0, F1 below 1."""
EQUAL: dict[str, tuple[tuple[str, ...], Pairs]] = {
    "the same": (ALL, pairs(WHOLE, str, str)),
    "space around": (ALL, pairs(WHOLE, str, " {} ".format)),
    "a full stop": (ALL, pairs(WHOLE, str, "{}.".format)),
    "thousands": (ALL, pairs(st.integers(1000, 10**9), str, "{:,}".format)),
    "zeros at the end": (ALL, pairs(WHOLE, str, "{}.00".format)),
    "plus signs": (ALL, pairs(WHOLE, str, "+{}".format)),
    "minus signs": (ALL, pairs(WHOLE, "-{}".format, "−{}".format)),
    "a sign apart": (ALL, pairs(WHOLE, "-{}".format, "- {}".format)),
    "full width": (ALL, pairs(WHOLE, str, lambda n: str(n).translate({48 + i: 0xFF10 + i for i in range(10)}) + "。")),
    "thin spaces": (ALL, pairs(st.integers(1000, 10**9), str, lambda n: f"{n:,}".replace(",", "\u202f"))),
    "emphasis": (ALL, pairs(WHOLE, str, "**{}**".format)),
    "thousands in other countries": (
        NUMBERS,
        pairs(
            st.tuples(st.integers(10**6, 10**9), st.sampled_from(".' ")),
            "{0[0]}".format,
            lambda n: f"{n[0]:,}".replace(",", n[1]),
        ),
    ),
    "mixed numbers": (
        NUMBERS,
        pairs(
            st.tuples(DIGIT, st.sampled_from([" 1/4", "¼", r"\frac14", r"\,\frac{1}{4}"])),
            "{0[0]}.25".format,
            "{0[0]}{0[1]}".format,
        ),
    ),
    "scientific notation": (
        NUMBERS,
        pairs(
            st.tuples(DIGIT, st.sampled_from(["{}e3", "{} × 10³", r"{}\times10^{{3}}", "{} thousand", "{} x 10^3"])),
            "{0[0]}000".format,
            lambda n: n[1].format(n[0]),
        ),
    ),
    "powers": (NUMBERS, pairs(st.integers(2, 99), lambda n: str(n**2), "{}²".format)),
    "percent in words": (NUMBERS, pairs(WHOLE, "{}%".format, "{} percent".format)),
    "percent of a variable": (("math",), pairs(WHOLE, "{}%".format, "x = {}%".format)),
    "repeating decimals": (("math",), pairs(DIGIT, "{}/9".format, r"0.\overline{{{}}}".format)),
    "roots": (("math",), pairs(st.integers(2, 9), r"\sqrt{{{}}}".format, "√{}".format)),
    "infinity": (("math",), pairs(WHOLE, r"({},\infty)".format, "({}, ∞)".format)),
    "degrees": (("math",), pairs(WHOLE, r"{}^\circ".format, "{}°".format)),
    "amounts": (("math",), pairs(WHOLE, "{} dollars".format, r"\${}.00".format)),
    "speeds": (("math",), pairs(WHOLE, "{} m/s".format, r"{}\text{{ m/s}}".format)),
    "percent and hundredths": (NUMBERS, pairs(st.integers(1, 99), lambda n: str(n / 100), "{}%".format)),
    "fractions and decimals": (NUMBERS, pairs(DIGIT, lambda n: str(n / 8), "{}/8".format)),
    "fractions in LaTeX": (
        NUMBERS,
        pairs(st.tuples(DIGIT, DIGIT), "{0[0]}/{0[1]}".format, r"\frac{{{0[0]}}}{{{0[1]}}}".format),
    ),
    "normal forms": (
        NO_NUMERIC,
        pairs(WORD, lambda word: f"{word}é", lambda word: unicodedata.normalize("NFD", f"{word}é")),
    ),
    "case": (NO_NUMERIC, pairs(WORD, str, str.upper)),
    "spellings of a choice": (
        NO_NUMERIC,
        st.tuples(LETTER, st.sampled_from(["({})", "{}.", "{})", "{}"])).map(
            lambda two: (two[0], two[1].format(two[0]))
        ),
    ),
    "choices in lower case": (NO_NUMERIC, pairs(LETTER, str, str.lower)),
    "articles": (TEXT, pairs(WORD, str, "The {}!".format)),
    "quotes": (TEXT, pairs(WORD, str, '"{}"'.format)),
    "units written out": (("math",), pairs(WHOLE, "{} cm".format, r"{}\text{{ centimeters}}".format)),
    "units that only one has": (("math",), pairs(WHOLE, str, "{} cm".format)),
    "order of a set": (("math",), pairs(TWO, r"\{{{0[0]}, {0[1]}\}}".format, r"\{{{0[1]}, {0[0]}\}}".format)),
    "products": (("math",), pairs(st.permutations("xyz"), lambda letters: "xyz", "".join)),
}
"""These must be equal: reward 1."""


def cases(relations: dict[str, tuple[tuple[str, ...], Pairs]]) -> list[Any]:
    rows = ((name, reward, strategy) for name, (rewards, strategy) in relations.items() for reward in rewards)
    return [pytest.param(reward, strategy, id=f"{name}-{reward}") for name, reward, strategy in rows]


def scores(rollout: Callable[..., Rollout], reward: str, label: str, answer: str) -> list[float]:
    """Return the rewards of the answer for the label, and of the label as an answer for the answer."""
    shape = r"so \boxed{%s}" if reward == "math" else "%s"
    function = reward_function(reward)
    both = ((label, answer), (answer, label))
    return [function(Sample.from_rollout(rollout(shape % answer, label=label))) for label, answer in both]


def examples(reward: str) -> settings:
    """Math-verify takes hundredths of a second."""
    return settings(max_examples=3) if reward == "math" else settings()


@pytest.mark.parametrize(("reward", "strategy"), cases(DIFFERENT))
def test_different_answers_stay_different(rollout: Callable[..., Rollout], reward: str, strategy: Pairs) -> None:
    @examples(reward)
    @given(strategy)
    def check(pair: tuple[str, str]) -> None:
        try:
            found = scores(rollout, reward, *pair)
        except ValueError as error:  # what is no number, or no expression, can be no label
            assume("the label" in str(error))
            found = [0.0]
        assert max(found) < 1.0, pair

    check()


@pytest.mark.parametrize(("reward", "strategy"), cases(EQUAL))
def test_equal_answers_are_equal(rollout: Callable[..., Rollout], reward: str, strategy: Pairs) -> None:
    @examples(reward)
    @given(strategy)
    def check(pair: tuple[str, str]) -> None:
        assert scores(rollout, reward, *pair) == [1.0, 1.0], pair

    check()


def test_every_built_in_reward_has_relations() -> None:
    rewards = {reward for relations in (DIFFERENT, EQUAL) for rewards, _ in relations.values() for reward in rewards}
    joins_more = {"squad_exact_match", "squad_f1"}  # SQuAD's normalisation joins what it joins
    other_rules = {"dapo", "deepscaler", "gpqa", "ifbench", "code", "environment"}  # test_builtin_answers.py
    assert set(names(REWARDS)) - joins_more - other_rules == rewards
