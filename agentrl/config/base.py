"""The base of every configuration section."""

from __future__ import annotations

from math import inf
from typing import Annotated, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from agentrl.core.user_code import MAX_SECONDS

Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
_FLOAT32 = (1e-37, 3e38)
"""Sizes of numbers with which learner and engines compute."""


def _with_strict_scalars(schema: object) -> object:
    """Return a schema in which scalars keep to their types; values of other types are refused."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_with_strict_scalars, schema))
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind == "function-before" and schema["function"]["function"] in (_number, _whole_number, _text):
        return schema  # of a subsection
    if kind == "bool":
        return {**schema, "strict": True}
    if kind == "float":
        return no_info_before_validator_function(_number, {**schema, "strict": True})
    if kind == "int":
        return no_info_before_validator_function(_whole_number, {**schema, "strict": True})
    if kind == "str":
        return no_info_before_validator_function(_text, {**schema, "strict": True})
    return {
        key: value if key in ("default", "metadata") else _with_strict_scalars(value) for key, value in schema.items()
    }


def _number(value: object) -> object:
    smallest, largest = _FLOAT32
    if isinstance(value, int | float) and (0 < abs(value) < smallest or largest < abs(value) < inf):
        raise ValueError("it is 0 or infinite in 32 bits")
    return value


def _whole_number(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("it has more than 64 bits")
    return value


def _text(value: object) -> object:
    return str(value) if type(value) is int else value


class Section(BaseModel):
    """A section: unknown keys fail, numbers are finite, and every field is documented where it is defined.

    A boolean is no number, a number is no boolean, and text is neither. A whole number is text where text is expected, so that
    ``run.dir=2026`` names a folder.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the section with strict scalars."""
        return cast("CoreSchema", _with_strict_scalars(handler(source)))
