import asyncio
import contextlib
import math
import time
from fractions import Fraction

import pytest
from agentrl_tools.calculator import CalculatorError, CalculatorService, CalculatorTool, evaluate
from agentrl_tools.calculator.functions import FUNCTIONS
from agentrl_tools.calculator.numbers import exact_root, format_number
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from tests.unit.toolserver.tool_sessions import NoSession

WHOLE = st.integers(-(10**6), 10**6)
DECIMAL = st.decimals(-(10**6), 10**6, places=4, allow_nan=False)
LEAF = st.one_of(
    WHOLE.map(lambda n: (f"({n})", Fraction(n))),
    DECIMAL.map(lambda d: (f"({d:f})", Fraction(d))),
    st.integers(0, 255).map(lambda n: (hex(n), Fraction(n))),
)


def _joined(parts: tuple[tuple[str, Fraction], str, tuple[str, Fraction]]) -> tuple[str, Fraction]:
    (left_text, a), sign, (right, b) = parts
    if sign in "/%//" and b == 0:
        sign = "+"
    values = {"+": a + b, "-": a - b, "*": a * b}
    if b:
        values |= {"/": a / b, "//": Fraction(a // b), "%": a % b}
    return f"({left_text} {sign} {right})", values[sign]


def _raised(parts: tuple[tuple[str, Fraction], int]) -> tuple[str, Fraction]:
    (text, value), exponent = parts
    exponent = abs(exponent) if value == 0 else exponent
    return f"({text}) ** {exponent}", value**exponent


TREES = st.recursive(
    LEAF,
    lambda below: st.one_of(
        st.tuples(below, st.sampled_from(["+", "-", "*", "/", "//", "%"]), below).map(_joined),
        st.tuples(below, st.integers(-3, 3)).map(_raised),
        below.map(lambda one: (f"-({one[0]})", -one[1])),
    ),
    max_leaves=6,
)


@given(TREES)
def test_arithmetic_is_that_of_fractions(tree: tuple[str, Fraction]) -> None:
    text, value = tree
    result = evaluate(text)
    assert isinstance(result, Fraction)
    assert result == value


@given(st.fractions(), st.integers(1, 9))
def test_a_root_is_exact_where_it_is_rational(root: Fraction, degree: int) -> None:
    root = abs(root)
    assert exact_root(root**degree, degree) == root
    assert evaluate(f"(({root}) ** {degree}) ** (1/{degree})") == root


@given(st.integers(2, 10**30), st.integers(2, 7))
def test_a_root_that_is_not_whole_is_told_from_one_that_is(number: int, degree: int) -> None:
    root = exact_root(Fraction(number), degree)
    assert (root is not None) == any(
        (round(number ** (1 / degree)) + i) ** degree == number for i in range(-2000, 2000)
    )


@given(st.fractions())
def test_what_is_shown_is_the_number(number: Fraction) -> None:
    assert Fraction(format_number(number).split(" ")[0]) == number


NUMBERS = ["0", "-1", "0.5", "1/3", "pi", "9**999", "1e-999", "-exp(700)", "1e308", "449", "3322", "2**0.5", "10**999"]
WILD = st.recursive(
    st.sampled_from(NUMBERS),
    lambda below: st.one_of(
        st.tuples(below, st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), below).map(
            lambda parts: f"({''.join(parts)})"
        ),
        st.tuples(st.sampled_from(sorted(FUNCTIONS)), st.lists(below, min_size=1, max_size=3)).map(
            lambda call: f"{call[0]}({','.join(call[1])})"
        ),
    ),
    max_leaves=8,
)


@given(st.one_of(st.text(max_size=60), WILD))
def test_any_text_has_a_value_or_a_fault(text: str) -> None:
    with contextlib.suppress(CalculatorError):  # and nothing else is raised
        value = evaluate(text)
        assert isinstance(value, Fraction) or math.isfinite(value)
        assert len(format_number(value)) < 2100


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0.1 + 0.2", "0.3"),
        ("2^10", "1024"),
        ("2*3^2", "18"),
        ("1/3", "1/3 ≈ 0.333333333333333"),
        ("sqrt(2)", "≈ 1.4142135623731"),
        ("sqrt(16/9) * 3", "4"),
        ("8**(2/3)", "4"),
        ("cbrt(-27)", "-3"),
        ("log(8, 2) + log10(1000)", "6"),
        ("comb(10, 3) + perm(5, 2) + factorial(5)", "260"),
        ("comb(5, 7) + perm(5, 7)", "0"),
        ("gcd(12, 18) + lcm(4, 6)", "18"),
        ("pow(3, 100, 7)", "4"),
        ("(-1)**(10**500 + 1)", "-1"),
        ("0**0", "1"),
        ("min(3, 1/2) + max(1) + sum(1, 2, 3) + mean(1, 2)", "9"),
        ("round(2.5) + round(1.2345, 2)", "3.23"),
        ("-7 % 3 + -7.5 // 2", "-2"),
        ("mod(17, 5) + abs(-3) + floor(2.7) + ceil(2.1)", "10"),
        ("2 × 6 ÷ 4 − 1", "2"),
        ("1_000.5 * 2", "2001"),
        ("123456789.123456789e-3", "123456.789123456789"),
        ("+".join(["1"] * 900), "900"),
    ],
)
def test_values(expression: str, expected: str) -> None:
    assert format_number(evaluate(expression)) == expected


@pytest.mark.parametrize("name", ["sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "ln"])
def test_functions_of_real_numbers(name: str) -> None:
    assert evaluate(f"{name}(0.7)") == pytest.approx(getattr(math, "log" if name == "ln" else name)(0.7), rel=1e-15)


HOSTILE = {
    "a tower": ("9**9**9**9", "1000 digits"),
    "a negative tower": ("9**-9**9**9", "1000 digits"),
    "a huge factorial": ("factorial(10**9)", "1000 digits"),
    "a huge choice": ("comb(10**900, 500)", "1000 digits"),
    "the widest choice": ("comb(10**9, 5*10**8)", "1000 digits"),
    "many orders": ("perm(10**900, 500)", "1000 digits"),
    "a huge literal": ("9" * 1500, "1000 digits"),
    "a huge exponent": ("1e999999999", "1000 digits"),
    "an exponent beyond decimals": ("1e99999999999999999999999999", "1000 digits"),
    "a tiny literal": ("1e-999999999", "1000 digits"),
    "a long text": ("1+" * 5000 + "1", "2000 characters"),
    "deep brackets": ("(" * 900 + "1" + ")" * 900, "nested"),
    "deep signs": ("-" * 1900 + "1", "nested"),
    "deep powers": ("1**" * 600 + "1", "nested"),
    "deep calls": ("abs(" * 150 + "1" + ")" * 150, "nested"),
    "growing products": ("*".join(["9**900"] * 200), "1000 digits"),
    "a huge modular power": ("pow(9**999, 9**999, 9**998)", "1024 bits"),
    "huge rounding": ("round(5, 10**50)", "round"),
    "a huge float": ("exp(1000)", "too large"),
    "a shift": ("1 << 10**9", "not arithmetic"),
    "a division by zero": ("1/(2-2)", "division by zero"),
    "nothing to a negative power": ("0 ** -exp(7)", "division by zero"),
    "nearly nothing to a negative power": ("(1e-999) ** -exp(7)", "division by zero"),
    "no number at all": ("(-8)**0.5", "not a real number"),
    "the logarithm of nothing": ("log(0)", "logarithm"),
    "an import": ("__import__('os').system('true')", "not arithmetic"),
    "an attribute": ("(1).__class__", "not arithmetic"),
    "a name": ("open", "there is no 'open'"),
    "a call of a call": ("abs(1)(2)", "not arithmetic"),
    "a lambda": ("(lambda: 1)()", "not arithmetic"),
    "a comprehension": ("[i for i in (1, 2)]", "not arithmetic"),
    "a string": ("'a' * 3", "no number"),
    "a truth": ("True + 1", "no number"),
    "an imaginary number": ("1j", "no number"),
    "keywords": ("round(1.5, places=1)", "there is no"),
    "a list": ("sum(*[1])", "a list"),
    "a thousand": ("1,000", "commas"),
    "two lines": ("1\nprint(1)", "no expression"),
    "half a character": ("\ud800", "no expression"),
    "a null": ("1\0", "no expression"),
    "nothing": ("", "no expression"),
    "too few numbers": ("min()", "0 numbers"),
}


def seconds(expression: str, fault: str | None = None) -> float:
    """Return the CPU seconds of the fastest of three evaluations: another one may hold a garbage collection."""
    spent = []
    for _ in range(3):
        began = time.thread_time()
        with contextlib.nullcontext() if fault is None else pytest.raises(CalculatorError, match=fault):
            evaluate(expression)
        spent.append(time.thread_time() - began)
    return min(spent)


@pytest.fixture(scope="module")
def plain_seconds() -> float:
    """CPU seconds of the longest plain sum, some milliseconds: what other expressions are compared with."""
    return seconds("+".join(["1"] * 1000))


@pytest.mark.parametrize(("expression", "fault"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_refused_is_refused_at_once(expression: str, fault: str, plain_seconds: float) -> None:
    assert seconds(expression, fault) < 20 * plain_seconds


@pytest.mark.parametrize(
    "expression", ["sqrt(9**999)", "comb(3000,1500)*0", "pow(9**320,9**320,9**320-1)*0", "log(9**999,3)"]
)
def test_the_longest_expressions_are_fast(expression: str, plain_seconds: float) -> None:
    assert seconds("+".join([expression] * (2000 // (len(expression) + 1)))) < 100 * plain_seconds


def call(expression: str) -> ToolResult:
    tool = CalculatorTool()
    return asyncio.run(tool.call(NoSession(), ToolCall("c", "calculator", {"expression": expression})))


def test_the_tool_answers_with_text_and_data() -> None:
    assert call("1/4") == ToolResult("c", ToolStatus.OK, "0.25", {"value": "1/4", "exact": True})
    assert call("sqrt(2)").data == {"value": "1.4142135623730951", "exact": False}
    assert call("1/0") == ToolResult("c", ToolStatus.ERROR, "error: division by zero")


def test_the_service_says_what_it_offers() -> None:
    (tool,) = CalculatorService().tools({})
    assert (tool.name, tool.server) == ("calculator", "calculator")
    assert not CalculatorService.sandboxed
