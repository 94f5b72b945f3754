"""Scores of short answers."""

from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.rewards import answer_text, exact_match, f1, last_boxed, normalize, squad_normalize

WORDS = st.lists(st.text("bcdefg0123", min_size=1), min_size=1)


def test_squad_normalize_follows_squad() -> None:
    assert squad_normalize("  The  U.S.A., an-island\tof A people ") == "usa anisland of people"
    assert squad_normalize("-3.5") == "35"


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("  The  Eiffel\tTower! ", "eiffel tower"),
        ("A", "a"),
        ("(b).", "b"),
        ("Vitamin A", "vitamin a"),
        ("a vitamin of the hepatitis A virus", "vitamin of hepatitis a virus"),
        ("The The", "the"),
        ("U.S.", "u.s"),
        ("C++", "c++"),
        ("5!", "5!"),
        ('6"', '6"'),
        ("“Mona Lisa”", "mona lisa"),
        ("'tis", "'tis"),
        ("-1,234.50", "-1234.5"),
        ("− .5", "-0.5"),
        ("-0", "0"),
        ("007", "007"),
        ("4 %", "4%"),
        ("12 % of it", "12% of it"),
        ("1,5", "1,5"),
        ("٣", "٣"),
        ("...", ""),
    ],
)
def test_normalize(text: str, normalized: str) -> None:
    assert normalize(text) == normalized


@given(st.text())
def test_normalizing_twice_changes_nothing_more(text: str) -> None:
    once = normalize(text)
    assert exact_match(text, [once]) == float(bool(once)) or normalize(once) != once


@given(WORDS.map(" ".join))
@pytest.mark.parametrize("normalization", [normalize, squad_normalize])
def test_exact_match_overlooks_case_articles_and_punctuation(normalization: Callable[[str], str], answer: str) -> None:
    assume(not answer[0].isdigit())
    assert exact_match(f" The {answer.upper()}x!\n", ["other", f"{answer}x"], normalization) == 1.0
    assert exact_match(f"{answer} x", [answer], normalization) == 0.0
    assert exact_match(answer, [], normalization) == 0.0


@given(st.text(" .,;:?\n"))
def test_an_answer_of_nothing_but_punctuation_never_matches(answer: str) -> None:
    assert exact_match(answer, [answer, "", "the"]) == 0.0
    assert f1(answer, [answer, "", "the"]) == 0.0


@given(WORDS, WORDS, st.randoms())
def test_f1_lies_between_0_and_1_and_knows_no_order(words: list[str], right: list[str], random: object) -> None:
    score = f1(" ".join(words), [" ".join(right)])
    assert 0.0 <= score <= 1.0
    assert score == f1(" ".join(right), [" ".join(words)])
    assert score == f1(" ".join(reversed(words)), [" ".join(right)])
    assert (score == 1.0) == (sorted(words) == sorted(right))
    assert (score == 0.0) == (not set(words) & set(right))


@given(WORDS, st.lists(WORDS, min_size=1))
def test_f1_is_that_of_the_best_accepted_answer(words: list[str], rights: list[list[str]]) -> None:
    answer, accepted = " ".join(words), [" ".join(right) for right in rights]
    assert f1(answer, accepted) == max(f1(answer, [one]) for one in accepted)


def test_f1_counts_each_word_as_often_as_it_stands() -> None:
    assert f1("The cat sat sat", ["cat sat"]) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert f1("x", []) == 0.0


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ("  42 \n", "42"),
        ("<think>7 or 8</think> 8", "8"),
        ("<think><answer>7</answer></think>\nIt is <answer> 8 </answer>.", "8"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer><answer>1</answer></answer>", "1"),
        ("<think>7 or 8", ""),
        ("<think>7</think>so <think>8", "so"),
        ("<answer>1", "<answer>1"),
        ("1</answer>", "1</answer>"),
        ("<answer><answer>1</answer>", "1"),
        ("", ""),
    ],
)
def test_answer_text(turn: str, text: str) -> None:
    assert answer_text(turn) == text


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} and \boxed {2}.", "2"),
        (r"\boxed{\frac{1}{2}} \boxed{un", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \boxed{b}}", r"a \boxed{b}"),
        (r"}} \boxed{3} }}", "3"),
        (r"\boxed{1} \fbox{2}", "2"),
        (r"\boxed{3\\}", r"3\\"),
        (r"\\boxed{4}", "4"),
        ("no box {4}", None),
        (r"\boxed{", None),
    ],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@given(st.text(r"\{}abc", max_size=30))
def test_last_boxed_finds_any_balanced_content(noise: str) -> None:
    assert last_boxed(noise + r"\boxed{x{y}z}") == "x{y}z" or noise.endswith("\\") or "{" in noise
    last_boxed(noise)
