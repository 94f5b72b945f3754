"""One published row as a problem with tests: APPS, TACO, DeepCoder, CodeContests, and rows of your own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.errors import ConfigError
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
"""What is read. Published files have more, such as thousands of solutions."""
_FUNCTION_KEYS = ("fn_name", "func_name")


@dataclass(frozen=True, slots=True)
class Published:
    """What a row holds."""

    statement: str
    """The problem in words, mostly with examples."""
    public: tuple[Example, ...]
    """Tests that the policy may see; already in the statement of most sets."""
    hidden: tuple[Example, ...]
    """Tests that it may not."""
    facts: Mapping[str, str]
    """``difficulty`` and ``source``, where the row has them."""


class FunctionStyle(ConfigError):
    """A row wants a function and no program; see the option ``functions``."""


def parse_row(row: Row) -> Published:
    """Return the problem in a row.

    Raises:
        FunctionStyle: its tests call a function.
        ConfigError: a key is missing or its value does not fit; the message has file, line or row, and the keys there.

    """
    statement = next((row.values[name] for name in STATEMENTS if row.values.get(name)), None)
    if not isinstance(statement, str):
        raise _fault(row, f"has no problem in words; it is looked for in {', '.join(STATEMENTS)}")
    public = _collect(row, "public_tests")
    hidden = _collect(row, "private_tests", "generated_tests", "input_output", "tests")
    hidden = hidden or public  # some rows of CodeContests have no others
    if not hidden:
        raise _fault(row, "has no tests; they are looked for in input_output, tests, private_tests, generated_tests")
    facts = {key: str(row.values[key]) for key in ("difficulty", "source") if row.values.get(key) is not None}
    return Published(statement.strip(), public, hidden, facts)


def _collect(row: Row, *columns: str) -> tuple[Example, ...]:
    found: list[Example] = []
    for column in columns:
        value = _decoded(row, column)
        if value is not None:
            found += _examples(row, column, value)
    return tuple(found)


def _decoded(row: Row, column: str) -> Any:
    value = row.values.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise _fault(row, f"has in {column!r} what is no JSON: {error}") from None


def _examples(row: Row, column: str, value: Any) -> list[Example]:
    """Read ``{inputs: […], outputs: […]}``, ``{input: […], output: […]}``, or ``[{input, output}, …]``."""
    _refuse_functions(row, column, value)
    if isinstance(value, Sequence):
        if not all(isinstance(one, Mapping) and "input" in one and "output" in one for one in value):
            raise _fault(row, f"has in {column!r} a list of something else than {{input, output}}")
        given, wanted = [one["input"] for one in value], [one["output"] for one in value]
    elif isinstance(value, Mapping):
        given = value.get("inputs", value.get("input"))
        wanted = value.get("outputs", value.get("output"))
    else:
        raise _fault(row, f"has in {column!r} a {type(value).__name__}, and no inputs and outputs")
    if not isinstance(given, Sequence) or not isinstance(wanted, Sequence) or len(given) != len(wanted):
        raise _fault(row, f"has {column!r} without inputs and outputs, lists of one length")
    return [Example(_text(row, column, a), _text(row, column, b)) for a, b in zip(given, wanted, strict=True)]


def _text(row: Row, column: str, value: Any) -> str:
    """Return one input or output; some files have a list of its lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise _fault(row, f"has in {column!r} {value!r:.60}, which is neither a text nor a list of lines")


def _refuse_functions(row: Row, column: str, value: Any) -> None:
    metadata = _decoded(row, "metadata")
    cases = value if isinstance(value, Sequence) else [value]
    named = [
        holder[key]
        for holder in (metadata, *cases)
        if isinstance(holder, Mapping)
        for key in _FUNCTION_KEYS
        if holder.get(key)
    ]
    styled = any(isinstance(case, Mapping) and case.get("type", "stdin_stdout") != "stdin_stdout" for case in cases)
    if named or styled:
        name = f" ({named[0]})" if named else ""
        raise FunctionStyle(
            f"{row.place} has tests in {column!r} that call a function{name}, and programs are judged by what they read "
            "and print; tasks.options.functions=skip leaves such rows out"
        )


def _fault(row: Row, what: str) -> ConfigError:
    return ConfigError(f"{row.place} {what}; it has: {', '.join(row.columns) or 'nothing'}")
