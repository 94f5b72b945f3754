"""The keys that rollouts in the journal of a run, and its checkpoints, were made with, and what follows if one changes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import TypeAdapter

from agentrl.config.agent import command_files
from agentrl.config.base import Section
from agentrl.config.layers import Difference, leaf_texts
from agentrl.config.schema import Config
from agentrl.config.secret_values import REDACTED, redact
from agentrl.core.errors import ConfigError
from agentrl.core.imports import imported_files, is_reference, python_source, source_file
from agentrl.core.registry import ENVS, REWARDS, TASKS, TOOLS, plugin_code

CODE, CONTENT = "code of ", "content of "
"""Begin the names of checksums: of a file with the user's code, and of tasks or a template."""

FIXED = (
    "run.seed",
    "env.name",
    "tasks.name",
    "tasks.options",
    "tasks.train_split",
    "tasks.data_source",
    "data.path",
    "data.rows_key",
    "data.limit",
    "data.streaming",
    "data.shuffle_buffer",
    "data.convert",
    "data.max_prompt_tokens",
    "model.path",
    "model.warm_start",
    "model.warm_start_options",
    "learner.lora",
    "sources",
)
"""Keys that a resumed run may not change, of its sources either: with another value it would be another run."""

LOADED = ("learner.freeze", "learner.optimizer.name", "algo.critic.path")
"""Keys that a resumed run may not change because its checkpoints would not fit, or have what they name."""

SAMPLED = (
    CODE,
    CONTENT,
    "env.options",
    "env.roles",
    "data.input_key",
    "data.image_key",
    "data.label_key",
    "data.metadata_key",
    "data.id_key",
    "data.apply_chat_template",
    "reward.function",
    "reward.key",
    "reward.on_error",
    "reward.error_score",
    "reward.remote",
    "reward.judge",
    "reward.functions",
    "tools",
    "render",
    "sampler.temperature",
    "sampler.top_p",
    "sampler.top_k",
    "sampler.renormalise",
    "sampler.max_new_tokens",
    "sampler.stop",
    "rollout.reset_seed",
    "rollout.max_turns",
    "rollout.max_tokens",
    "rollout.max_seconds",
    "rollout.generate",
    "rollout.agent",
    "self_play.swap_seats",
    "self_play.endpoints",
    "algo.routing_replay",
    "algo.score_centering",
)
"""Keys that decide how an episode is sampled, or its reward: rollouts that were recorded with another value are not trained."""

GROUPED = (
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "async.max_staleness",
    "self_play.mix",
)
"""Keys that decide which groups begin: with another value, groups that no step took are sampled again."""

TRAINED = (
    "algo",
    "async.mask_older_than",
    "batch",
    "learner.freeze",
    "learner.optimizer",
    "rollout.failure",
    "rollout.filter_groups",
    "sandbox",
    "train.steps_per_rollout",
)
"""Keys that decide how recorded rollouts are trained: a change is reported."""

_RECORDED = (*FIXED, *SAMPLED, *GROUPED, *TRAINED)

_UNIMPORTANT = ("url", "port", "start_timeout_s", "max_restarts")
"""Keys of a tool server that do not change its results."""
_ADDRESS = ("rollout.agent.host", "rollout.agent.idle_timeout_s")
"""Ends of keys of agents elsewhere that do not change what they sample."""
_REGISTERED = {"env.name": ENVS, "tasks.name": TASKS, "reward.function": REWARDS}
"""Groups of entry points by the keys that name one of them."""
_COMMAND = re.compile(r"(.*\.)?(rollout\.agent|env\.roles\.[^.]+\.program)\.command")
"""Keys with commands that start programs."""
_OBJECTS = ("name", "function", "generate", "convert", "player")
"""Last words of keys whose value may name code of the user."""


def recorded_keys(config: Config) -> dict[str, str]:
    """Return the keys that a run's rollouts are made with, and their values as text; no secrets, and null only where the default
    is another value.

    A checksum of each file of code that a key names is ``code of KEY``, of each module of the project that it imports ``code of
    FILE``, and that of a chat template ``content of KEY``. The distribution of a plugin and its version are ``code of KEY`` too.
    """
    texts = leaf_texts(redact(config.model_dump(mode="json")))
    keys = {
        key: "set" if key.endswith("rollout.agent.port") else text  # an agent elsewhere plays; whichever the port is
        for key, text in texts.items()
        if _is_among(key, _RECORDED) and REDACTED not in text and not key.endswith(_ADDRESS)
    }
    for key in default_texts():
        if key not in texts and _is_among(key, _RECORDED):
            keys[key] = "null"  # else it would count as a key that did not exist yet
    keys["sources"] = ", ".join(config.sources) or "none"
    tools = {f"tools.{name}": name for name in config.tools}
    return keys | dict(_checksums(keys | tools))


def _checksums(keys: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, text in keys.items():
        name = key.rpartition(".")[2]
        group = TOOLS if text == key.removeprefix("tools.") else _REGISTERED.get(".".join(key.split(".")[-2:]))
        if _is_among(key, TRAINED):
            continue
        if key.endswith("render.chat_template"):
            yield CONTENT + key, file_checksum(Path(text))
        elif _COMMAND.fullmatch(key):
            for path in command_files(text):
                yield from _code_checksums(path)
        elif is_reference(text) and (group is not None or name in _OBJECTS):
            if source := python_source(text):
                yield CODE + key, f"{zlib.crc32(source.encode()):08x}"
            elif (file := source_file(text)) is not None:
                yield from _code_checksums(file, key)
        elif group is not None:
            version, files = plugin_code(group, text)
            if version:
                yield CODE + key, version
            for file in files:
                yield from _code_checksums(file)


def _code_checksums(file: Path, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the checksum of a file, which ``key`` names, and of those that it imports."""
    for name, path in imported_files(file).items():
        yield CODE + (key if key and path == file.resolve() else name), file_checksum(path)


def file_checksum(path: Path) -> str:
    """Return name and CRC-32 of a file; without the CRC-32 if it cannot be read, which its reader reports."""
    try:
        return f"{path.name} {zlib.crc32(path.read_bytes()):08x}"
    except OSError:
        return path.name


def changed_keys(recorded: Mapping[str, str], keys: Mapping[str, str], kinds: Sequence[str]) -> list[Difference]:
    """Return the keys of ``kinds``, such as `FIXED`, that have another value than what was recorded.

    A key that was not recorded had its default: it may not have existed then.
    """
    names = [*keys, *(key for key in recorded if key not in keys)]
    pairs = [Difference(key, recorded_value(recorded, key), keys.get(key, "null")) for key in names]
    return [
        pair
        for pair in pairs
        if pair.before != pair.after
        and _is_among(pair.key, tuple(kinds))
        and (pair.after != "null" or pair.key in recorded)  # older runs have not recorded null
    ]


def changed_tasks(recorded: Mapping[str, str], contents: Mapping[str, str]) -> list[Difference]:
    """Return the checksums of tasks that differ from recorded ones; see `agentrl.data.task_sources.split_contents`."""
    return [
        Difference(key, recorded[key], text)
        for key, text in contents.items()
        if key.endswith((".train_split", ".path")) and key.startswith(CONTENT) and recorded.get(key, text) != text
    ]


def recorded_value(recorded: Mapping[str, str], key: str) -> str:
    """Return the recorded value of a key as text; that of a key that was not recorded is its default."""
    if key in recorded:
        return recorded[key]
    return default_texts().get(key) or _default_in_section(recorded, key)


@cache
def default_texts() -> dict[str, str]:
    """Return the defaults of keys as text, as `leaf_texts`."""
    return leaf_texts(Config().model_dump(mode="json"))


def _default_in_section(recorded: Mapping[str, str], key: str) -> str:
    """Return the default of a key below an optional section, or one with a name of the user's, that was recorded; else null.

    Sources record the keys alone that they set.
    """
    section_type: Any = Config
    names = key.split(".")
    for at, name in enumerate(names):
        sections = [member for member in _members(section_type) if issubclass(member, Section)]
        fields = [
            field
            for section in sections
            for field_name, field in section.model_fields.items()
            if name in (field_name, field.alias)
        ]
        if sections and (not fields or (at and not _is_recorded(recorded, names[:at]))):
            return "null"
        if sections and at == len(names) - 1:
            default = fields[0].get_default(call_default_factory=True)
            annotation: Any = fields[0].annotation
            value = TypeAdapter(annotation).dump_python(default, mode="json")
            return leaf_texts({name: value}).get(name, "null")
        section_type = fields[0].annotation if sections else _value_type(section_type)
    return "null"


def _is_recorded(recorded: Mapping[str, str], names: Sequence[str]) -> bool:
    prefix = ".".join(names)
    return names[0] != "sources" and any(key.startswith(f"{prefix}.") for key in (*recorded, *default_texts()))


def _members(annotation: Any) -> Iterator[type]:
    """Yield the classes of a type: those of a union, without annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif isinstance(annotation, type):
        yield annotation


def _value_type(annotation: Any) -> Any:
    """Return the type of a mapping's values; None for other types."""
    return get_args(annotation)[1] if get_origin(annotation) is dict else None


def check_fixed(recorded: Mapping[str, str], keys: Mapping[str, str], folder: Path) -> None:
    """Check that a resumed run has the seed, environment, tasks, model, adapters and optimizer that it was recorded with.

    Raises:
        ConfigError: it has another one; the message names the key and both values.
    """
    faults = [
        f"{change.key}={change.after}: the run in {folder} has {change.before}; leave out {change.key}, or start another run"
        for change in changed_keys(recorded, keys, (*FIXED, *LOADED))
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def check_sampled(recorded: Mapping[str, str], keys: Mapping[str, str], what: str) -> None:
    """Check that the rollouts that a resumed run trains again would be sampled and graded as they were.

    Args:
        recorded: keys that they were made with.
        keys: of the resumed run.
        what: the recorded rollouts, for the message.

    Raises:
        ConfigError: they would not; the message names the keys, both values, and what to do.
    """
    if changes := changed_keys(recorded, keys, SAMPLED):
        lines = "\n".join(f"  {change}" for change in changes)
        raise ConfigError(
            f"{what} were made with other values:\n{lines}\nTake the change back, or add --resample: what the journal has "
            "after the checkpoint is discarded, and sampled again"
        )


@lru_cache(maxsize=1 << 14)
def _is_among(key: str, kinds: tuple[str, ...]) -> bool:
    """Return whether a key is one of ``kinds`` or below one, of a source too."""
    section, _, source_key = key.partition(".")
    if section == "sources" and source_key:
        key = source_key.partition(".")[2]
        kinds = (*kinds, "weight") if "sources" in kinds else kinds
    if key.startswith("tools.") and key.split(".")[-1] in _UNIMPORTANT and "options" not in key.split("."):
        return False
    return any(key == kind or key.startswith(kind if kind in (CODE, CONTENT) else f"{kind}.") for kind in kinds)
