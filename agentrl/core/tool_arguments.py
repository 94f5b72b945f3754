"""Arguments of tools: the JSON Schema of a function and the conversion to its types, both by pydantic."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Annotated, Any, Unpack

from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from pydantic import Field, PydanticUserError, TypeAdapter
from pydantic import ValidationError as ConversionError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import PydanticSerializationError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012
from typing_extensions import override

from agentrl.core.tool_docs import parameter_descriptions
from agentrl.core.user_code import describe, user_error

MAX_NESTING = 100
"""Levels of lists and objects in the arguments of a call. Parsers and validators fail beyond several hundred."""

Function = Callable[..., Any]
"""The function of a tool."""
Schema = Mapping[str, Any]
"""A JSON Schema."""
Arguments = Mapping[str, Any]
"""The arguments of a call by name, as JSON has them."""
Values = dict[str, Any]
"""The arguments as a function gets them."""
Convert = Callable[[Arguments], Values]
"""Returns the arguments of a call as the types that the function names. Raises ValueError if they do not fit."""


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out the titles of fields, which repeat their names, and defaults that JSON cannot say."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    @override
    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    @override
    def encode_default(self, dft: Any) -> Any:
        value = super().encode_default(dft)
        try:
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise PydanticSerializationError(str(error)) from error
        return value


def function_schema(function: Function) -> tuple[Schema, Convert]:
    """Return the JSON Schema of a function's arguments, and the conversion to the types of its parameters.

    Raises:
        TypeError: no call could fit: a parameter has no type hint, a type that JSON cannot say, or no name in calls.
    """
    adapter = _arguments_adapter(function)
    try:
        schema = adapter.json_schema(schema_generator=_WithoutTitles)
    except (PydanticUserError, PydanticSerializationError) as error:
        raise TypeError(f"{function_name(function)}: JSON cannot say its arguments: {_first_line(error)}") from error
    defaults = {"type": "object", "properties": {}, "required": []}  # in the order in which the policy reads them
    schema = defaults | schema
    for name, description in parameter_descriptions(inspect.getdoc(definition(function)) or "").items():
        if name in schema["properties"]:
            schema["properties"][name].setdefault("description", description)
    return schema, _converter(adapter, function)


def definition(function: Function) -> Function:
    """Return what has the name, the docstring and the types of a callable: the function of a partial, a method of an object."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) or hasattr(function, "__wrapped__") else type(function).__call__


def function_name(function: Function) -> str:
    """Return the name of a function, or of the class of an object with ``__call__``."""
    name = definition(function).__name__
    return name if name != "__call__" else type(function).__name__


def conversion(function: Function) -> Convert:
    """Return the conversion to the types of a function's parameters; without type hints, arguments stay as they are."""
    try:
        return _converter(_arguments_adapter(function), function)
    except TypeError:
        return dict


def _arguments_adapter(function: Function) -> TypeAdapter[Values]:
    """Return what validates a function's keyword arguments and returns them."""
    name, defined = function_name(function), definition(function)
    annotations = getattr(defined, "__annotations__", {}).copy()
    annotations.pop("return", None)  # may be a name that only type checkers import
    names = getattr(inspect.unwrap(defined), "__globals__", None)
    try:
        hints = typing.get_type_hints(SimpleNamespace(__annotations__=annotations), names, include_extras=True)
    except (NameError, AttributeError, SyntaxError) as error:
        raise TypeError(
            f"{name}: a type hint cannot be resolved: {error}; types must be defined in the module"
        ) from error
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise TypeError(
                f"{name}: calls pass arguments by name, and parameter {parameter.name!r} has none in a call"
            )
        if parameter.name not in hints:
            raise TypeError(f"{name}: parameter {parameter.name!r} has no type hint")
        kind = parameter.kind if parameter.kind is parameter.VAR_KEYWORD else parameter.KEYWORD_ONLY
        hint = hints[parameter.name]
        if typing.get_origin(hint) is Unpack:
            raise TypeError(f"{name}: parameter {parameter.name!r} must have its keys as parameters, not in Unpack")
        for description in (note for note in getattr(hint, "__metadata__", ()) if isinstance(note, str)):
            hint = Annotated[hint, Field(description=description)]
        if parameter.default is None and not _accepts_null(hint):
            hint = hint | None
        parameters.append(parameter.replace(annotation=hint, kind=kind))

    def collect(**arguments: object) -> dict[str, object]:
        return arguments

    collect.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    collect.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    try:
        return TypeAdapter(collect)  # type: ignore[arg-type]  # a function stands for the type of its arguments
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise TypeError(f"{name}: {_first_line(error)}") from error


def _accepts_null(hint: Any) -> bool:
    try:
        TypeAdapter(hint).validate_json("null")
    except (ConversionError, PydanticSchemaGenerationError, PydanticUserError):
        return False
    return True


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


def _converter(adapter: TypeAdapter[Values], function: Function) -> Convert:
    parameters = inspect.signature(function).parameters.values()
    fields = [parameter.name for parameter in parameters if isinstance(parameter.default, FieldInfo)]

    def convert(arguments: Arguments) -> Values:
        try:
            values = adapter.validate_json(json.dumps(dict(arguments)))
        except ConversionError as error:
            first = error.errors(include_url=False)[0]
            location = "".join(f"[{key!r}]" for key in first["loc"])
            raise ValueError(f"{location}: {first['msg']}") from None
        except BaseException as error:  # of a validator of the user's type
            raise ValueError(f": {describe(user_error(error))}") from error
        return {name: values[name] for name in (*arguments, *fields)}  # the function has its other defaults

    return convert


@lru_cache(maxsize=1024)
def _validators(schema: str) -> tuple[Validator, Validator]:
    """Return validators of a schema, given as JSON: one by the standard, and one that takes 2.0 for no integer.

    Cached: checking the schema itself takes most of the time.
    """
    parsed = json.loads(schema)
    cls = validator_for(parsed)
    cls.check_schema(parsed)
    checker = cls.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    )
    return cls(parsed), extend(cls, type_checker=checker)(parsed)  # type: ignore[no-untyped-call]


def _find_validators(schema: Schema) -> tuple[Validator, Validator]:
    return _validators(json.dumps(schema, default=dict))


def arguments_fault(schema: Schema, arguments: Arguments) -> str:
    """Return where and how arguments violate a schema, in jsonschema's words; empty if they do not."""
    if is_too_deep(arguments):
        return f": the arguments are nested more than {MAX_NESTING} levels deep"
    try:
        error = best_match(_find_validators(schema)[0].iter_errors(dict(arguments)))
        if error is not None:
            location = "".join(f"[{key!r}]" for key in error.absolute_path)
            return f"{location}: {error.message}"
    except Unresolvable as error:
        return f": its schema has an unresolvable reference: {error}"
    except RecursionError:
        return ": its schema refers to itself without end"
    except (ArithmeticError, ValueError) as error:  # of numbers such as NaN and 1e999, which Python reads in JSON
        return f": the arguments hold a number that cannot be checked: {error}"
    return ""


def with_integers(schema: Schema, arguments: Arguments) -> Values:
    """Return checked arguments with 2.0, which JSON Schema takes for an integer, as 2 where the schema has an integer."""
    if not any(_is_integral(value) for value in _values(arguments)):
        return dict(arguments)
    converted = deepcopy(dict(arguments))
    for error in _find_validators(schema)[1].iter_errors(arguments):
        for leaf in _leaves(error):
            if leaf.validator == "type" and _is_integral(leaf.instance) and "integer" in str(leaf.validator_value):
                target: Any = converted
                *path, last = leaf.absolute_path
                for key in path:
                    target = target[key]
                target[last] = int(target[last])
    return converted


def _leaves(error: ValidationError) -> Iterator[ValidationError]:
    yield error
    for inner in error.context or ():
        yield from _leaves(inner)


def _is_integral(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def _values(value: object) -> Iterator[object]:
    yield value
    for child in _children(value):
        yield from _values(child)


def schema_problem(schema: Schema) -> str:
    """Return why no call could fit a tool's schema; empty if one could."""
    try:
        _find_validators(schema)
    except SchemaError as error:
        return f"its JSON Schema is invalid: {error.message}"
    except TypeError as error:
        return f"its JSON Schema is no JSON: {error}"
    if schema.get("type", "object") != "object":
        return f"its JSON Schema has the type {schema['type']!r}, and arguments are an object"
    properties, required = schema.get("properties", {}), schema.get("required", ())
    unknown = [name for name in required if name not in properties]
    if unknown and schema.get("additionalProperties") is False:
        return f"its JSON Schema requires {unknown[0]!r} and does not allow it"
    resource = DRAFT202012.create_resource(dict(schema))
    lookup = Registry().with_resource("", resource).resolver().lookup
    for value in _values(schema):
        reference = value.get("$ref") if isinstance(value, Mapping) else None
        if isinstance(reference, str):
            try:
                lookup(reference)
            except Unresolvable as error:
                return f"its JSON Schema has an unresolvable reference: {error}"
    return ""


def is_too_deep(arguments: Arguments) -> bool:
    """Return whether arguments are nested more than `MAX_NESTING` levels deep."""
    level: list[object] = [arguments]
    for _ in range(MAX_NESTING):
        level = [child for value in level for child in _children(value)]
        if not level:
            return False
    return any(isinstance(value, Mapping | list | tuple) for value in level)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
