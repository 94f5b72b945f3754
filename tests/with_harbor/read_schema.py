"""Run by Harbor's Python: prints the fields of its schema, or what it makes of documents; standard input is JSON."""

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Any, ForwardRef, get_args

from harbor.models.task import config
from harbor.models.task.config import TaskConfig
from harbor.models.task.task import Task
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined


def sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, str | ForwardRef):
        name = annotation if isinstance(annotation, str) else annotation.__forward_arg__
        annotation = getattr(config, name, None)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for member in get_args(annotation) for section in sections(member)]


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return the defaults of all fields by path; None for those without a simple one."""
    defaults: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        default = info.default.value if isinstance(info.default, Enum) else info.default
        simple = default is not PydanticUndefined and isinstance(default, bool | int | float | str)
        defaults[prefix + name] = default if simple else None
        for section in sections(info.annotation):
            defaults |= fields(section, f"{prefix}{name}.")
    return defaults


def is_valid(toml: str) -> bool:
    try:
        TaskConfig.model_validate_toml(toml)
    except ValidationError:
        return False
    return True


def main() -> None:
    request = json.load(sys.stdin)
    folders = [Task(Path(folder)) for folder in request["folders"]]
    reply = {
        "fields": fields(TaskConfig),
        "valid": [is_valid(toml) for toml in request["documents"]],
        "instructions": [task.instruction for task in folders],
    }
    json.dump(reply, sys.stdout)


main()
