"""Programs in a policy's turn, and the hidden tests that score them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeFloat, TypeAdapter, ValidationError

_FENCE = "```"
_PYTHON = ("python", "python3", "py")
_THINK_END = "</think>"


def program_in(content: str) -> str | None:
    r"""Return the last complete fenced block of Python, or None.

    Reasoning, up to ``</think>``, is ignored. Example: ``"So:\n```python\nprint(1)\n```"``.
    """
    program: str | None = None
    block: list[str] | None = None
    for line in content.rpartition(_THINK_END)[2].split("\n"):
        mark = line.strip()
        if block is None:
            if mark.startswith(_FENCE) and mark.removeprefix(_FENCE).strip().lower() in _PYTHON:
                block = []
        elif mark == _FENCE:
            program, block = "\n".join(block) + "\n", None
        else:
            block.append(line)
    return program if program is not None and program.strip() else None


def is_encodable(program: str) -> bool:
    """Return whether a text can be encoded as UTF-8: lone surrogates, which JSON allows, cannot."""
    try:
        program.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """Inputs and expected outputs of a program. Example: ``{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}``."""

    inputs: list[str]
    """Standard input, one text per test."""
    outputs: list[str]
    """Expected output, one text per test."""
    compare: Literal["tokens", "lines"] = "tokens"
    """Compare tokens, or whole lines."""
    tolerance: NonNegativeFloat | None = None
    """Allowed difference of numbers."""

    def arguments(self) -> dict[str, object]:
        """Return the tests as arguments of the tool ``judge``."""
        rule = {"compare": self.compare} | ({} if self.tolerance is None else {"tolerance": self.tolerance})
        return {"inputs": self.inputs, "outputs": self.outputs, **rule}


_TESTS = TypeAdapter(HiddenTests)


def read_tests(label: object) -> HiddenTests:
    """Return the hidden tests in a label: a mapping as `HiddenTests`, or a list of ``{"input", "output"}``, also as JSON text.

    Raises:
        ValueError: there are none; the message states what is wrong.
    """
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError):
            raise ValueError("it is a text that is no JSON") from None
    if isinstance(label, list) and all(isinstance(test, Mapping) for test in label):
        label = {name: [test.get(name[:-1]) for test in label] for name in ("inputs", "outputs")}
    if not isinstance(label, Mapping):
        raise ValueError("it is no mapping with inputs and outputs")
    if label.get("fn_name"):
        raise ValueError(f"its tests call the function {label['fn_name']!r}; programs read standard input here")
    try:
        tests = _TESTS.validate_python(label)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(key) for key in fault["loc"])
        raise ValueError(f"it holds no hidden tests: {where}: {fault['msg']}") from None
    if not tests.inputs or len(tests.inputs) != len(tests.outputs):
        raise ValueError(f"it has {len(tests.inputs)} hidden inputs and {len(tests.outputs)} outputs")
    return tests
