"""Numbers as people and models write them."""

import time
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.rewards import last_number, same_number


def read(text: str) -> Fraction:
    number = last_number(text)
    assert number is not None, text
    return number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 1,234.50.", Fraction("1234.5")),
        ("#### 72", 72),
        ("is −7, I think", -7),
        ("from 10-5", 5),
        ("- 5 apples", 5),
        ("- 5", -5),
        ("x = - 5", -5),
        (r"\boxed{- 5}", -5),
        ("10 - 5", 5),
        ("- 4\n- 5", 5),
        ("1_234 567", 567),
        ("12 345 678", 12_345_678),
        ("1'234", 1234),
        (r"1\,5", 5),
        ("x = -5", -5),
        ("it costs $1,000,000", 1_000_000),
        (r"\$18", 18),
        ("3/4 of them", Fraction(3, 4)),
        ("1 1/2 cups", Fraction(3, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac12", Fraction(1, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"1{,}234\,567", 1_234_567),
        (r"2 \times 10^{3}", 2000),
        (r"2.5 \cdot 10^-1", Fraction(1, 4)),
        ("10^6", 1_000_000),
        ("1.5e3", 1500),
        (r"\boxed{72}\ \text{cm}^2", 72),
        ("72 cm^2 of x_{1}", 72),
        (r"\boxed{A} that is 3", 3),
        (".5", Fraction(1, 2)),
        ("5kg of H2O", 5),
        ("1½", Fraction(3, 2)),
        ("5^{-2}", Fraction(1, 25)),
        ("72 m²", 72),
        ("10 minus 5", 5),
        ("it is minus 5", -5),
        ("2.5 Million dollars", 2_500_000),
        ("12,34,567", 1_234_567),
        ("1.234.567,8", Fraction("1234567.8")),
        ("-1 234.5", Fraction("-1234.5")),
        ("it is 7.000", 7),
    ],
)
def test_last_number(text: str, value: Fraction | int) -> None:
    assert read(text) == value


@pytest.mark.parametrize("text", ["", "none", "H2O", "1/0", "9" * 5000, "1e99999999", "e", "-", "٣"])
def test_what_is_no_number(text: str) -> None:
    assert last_number(text) is None


@given(st.integers(-(10**15), 10**15))
def test_whole_numbers_however_they_are_written(number: int) -> None:
    shapes = [str(number), f"{number:,}", f"it is {number}.", rf"\boxed{{{number}}}", f"{number}.0", f"**{number}**"]
    assert all(same_number(read(shape), read(str(number))) for shape in shapes)
    assert not same_number(read(str(number + 1)), read(f"{number:,}"))


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.sampled_from(["", "-"]))
def test_fractions_in_plain_text_and_latex(top: int, bottom: int, sign: str) -> None:
    right = Fraction(f"{sign}{top}") / bottom
    assert read(f"{sign}{top}/{bottom}") == right
    assert read(rf"${sign}\frac{{{top}}}{{{bottom}}}$") == right


@given(st.floats(-1e12, 1e12))
def test_floats_as_python_writes_them(number: float) -> None:
    assume(abs(number) > 1e-12 or number == 0)
    assert same_number(read(repr(number)), read(str(number)))
    assert same_number(read(repr(number * (1 + 1e-13))), read(repr(number)))


def test_percent_are_hundredths() -> None:
    assert read("50%") == read(r"50\%") == read("50 %") == Fraction(1, 2)
    assert not same_number(read("50%"), read("50"))


@given(st.text("0123456789.,-+/%^_{}\\ $e()frac×*", max_size=60))
def test_no_text_raises(text: str) -> None:
    last_number(text)


@pytest.mark.parametrize(
    "text", [" ", "-", "1 ", "{", "\\frac{", "\\boxed{", "10^", ",", "1,234", "<answer>", "\\frac 1"]
)
def test_no_text_takes_long(text: str) -> None:
    start = time.process_time()
    last_number(text * 8000)
    assert time.process_time() - start < 2
