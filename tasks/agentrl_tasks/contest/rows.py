"""Parsing of published rows into problems with tests: APPS, TACO, DeepCoder, CodeContests, and your own rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl import ConfigError
from agentrl.data.rows import Row

from .problem import Example

STATEMENTS = ("question", "problem", "description", "statement")
COLUMNS = (
    *STATEMENTS,
    "input_output",
    "tests",
    "metadata",
    "public_tests",
    "private_tests",
    "generated_tests",
    "difficulty",
    "source",
)
"""Columns to read. Published files have more, such as thousands of solutions."""
_FUNCTION_KEYS = ("fn_name", "func_name")


@dataclass(frozen=True, slots=True)
class Published:
    """The problem of a row."""

    statement: str
    """Text of the problem, mostly with examples."""
    public: tuple[Example, ...]
    """Tests that the policy may see; most data sets have them in the statement."""
    hidden: tuple[Example, ...]
    """Tests that the policy must not see."""
    metadata: Mapping[str, str]
    """``difficulty`` and ``source``, if the row has them."""


class FunctionStyle(ConfigError):
    """A row needs a function, not a program; see the option ``functions``."""


def parse_row(row: Row) -> Published:
    """Return the problem in a row.

    Raises:
        FunctionStyle: its tests call a function.
        ConfigError: a key is missing or its value is invalid; the message has file, line or row, and the keys there.
    """
    statement = next((row.values[name] for name in STATEMENTS if row.values.get(name)), None)
    if not isinstance(statement, str):
        raise _fault(row, f"has no text of the problem in any of the columns {', '.join(STATEMENTS)}")
    public = _tests(row, "public_tests")
    hidden = _tests(row, "private_tests", "generated_tests", "input_output", "tests")
    hidden = hidden or public  # some rows of CodeContests have no others
    if not hidden:
        raise _fault(row, "has no tests in any of the columns input_output, tests, private_tests, generated_tests")
    metadata = {key: str(row.values[key]) for key in ("difficulty", "source") if row.values.get(key) is not None}
    return Published(statement.strip(), public, hidden, metadata)


def _tests(row: Row, *columns: str) -> tuple[Example, ...]:
    tests: list[Example] = []
    for column in columns:
        value = _decode_json(row, column)
        if value is not None:
            tests += _examples(row, column, value)
    return tuple(tests)


def _decode_json(row: Row, column: str) -> Any:
    value = row.values.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise _fault(row, f"has in {column!r} a text that is not JSON: {error}") from None


def _examples(row: Row, column: str, value: Any) -> list[Example]:
    """Parse ``{inputs: […], outputs: […]}``, ``{input: […], output: […]}``, or ``[{input, output}, …]``."""
    _refuse_functions(row, column, value)
    if isinstance(value, Sequence):
        if not all(isinstance(case, Mapping) and "input" in case and "output" in case for case in value):
            raise _fault(row, f"has in {column!r} a list of other elements than {{input, output}}")
        inputs, outputs = [case["input"] for case in value], [case["output"] for case in value]
    elif isinstance(value, Mapping):
        inputs = value.get("inputs", value.get("input"))
        outputs = value.get("outputs", value.get("output"))
    else:
        raise _fault(row, f"has in {column!r} a {type(value).__name__} without inputs and outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise _fault(row, f"has {column!r} without inputs and outputs, lists of the same length")
    return [Example(_text(row, column, a), _text(row, column, b)) for a, b in zip(inputs, outputs, strict=True)]


def _text(row: Row, column: str, value: Any) -> str:
    """Return one input or output as text; some files have a list of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise _fault(row, f"has in {column!r} {value!r:.60}, which is neither a text nor a list of lines")


def _refuse_functions(row: Row, column: str, value: Any) -> None:
    metadata = _decode_json(row, "metadata")
    cases = value if isinstance(value, Sequence) else [value]
    function_names = [
        holder[key]
        for holder in (metadata, *cases)
        if isinstance(holder, Mapping)
        for key in _FUNCTION_KEYS
        if holder.get(key)
    ]
    has_function_type = any(
        isinstance(case, Mapping) and case.get("type", "stdin_stdout") != "stdin_stdout" for case in cases
    )
    if function_names or has_function_type:
        name = f" ({function_names[0]})" if function_names else ""
        raise FunctionStyle(
            f"{row.location} has tests in {column!r} that call a function{name}, but the judge tests programs by standard input "
            "and output; tasks.options.functions=skip skips such rows"
        )


def _fault(row: Row, problem: str) -> ConfigError:
    return ConfigError(f"{row.location} {problem}; it has: {', '.join(row.columns) or 'nothing'}")
