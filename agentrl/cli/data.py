"""``agentrl data show`` and ``agentrl data convert``."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text
from typing_extensions import override

from agentrl.cli.options import add_config_arguments, command_line_layers, config_layers
from agentrl.config.layers import Layer, load_layers, merge_layers
from agentrl.config.schema import Config
from agentrl.containers.convert import convert_swe_row, convert_terminal_bench, is_terminal_bench
from agentrl.containers.task_folder import load_task_folder
from agentrl.core.errors import ConfigError, ConversationError, UserError
from agentrl.core.images import IMAGE_MARK
from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.types import Message
from agentrl.data.chats import Chat, ChatConversion
from agentrl.data.conversion import PromptLimit, RowConversion
from agentrl.data.rows import Row, open_table
from agentrl.data.task_folders import describe_task
from agentrl.obs.console import make_console, print_message

if TYPE_CHECKING:
    from agentrl.render.renderer import ChatRenderer

KEY = "data.path"
SHOWN_ROWS = 3
"""Rows that are shown by default."""
MOST_FAULTS = 20
"""Bad rows that are printed."""
EVERY_S = 10.0
"""Seconds between lines that say how far it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser(
        "show",
        help="show what the rows of a file or dataset become",
        description="Show what the rows of a file or dataset become, with the settings of a run: prompt, label, metadata and "
        "tools of tasks, with --sft the trained tokens of chats, and all rows that cannot be used.",
    )
    show.add_argument("path", metavar="PATH", help="the value of data.path")
    show.add_argument("--sft", action="store_true", help="rows are chats, as agentrl sft reads them")
    show.add_argument("--rows", type=int, default=SHOWN_ROWS, metavar="N", help=f"rows to show; default {SHOWN_ROWS}")
    add_config_arguments(show)
    convert = actions.add_parser(
        "convert",
        help="write tasks of terminal-bench or SWE-bench as folders of container tasks",
        description="Write tasks of other formats as folders of container tasks in Harbor's format: folders of terminal-bench "
        "with task.yaml, or rows with the columns of SWE-bench.",
    )
    convert.add_argument(
        "path", metavar="PATH", help="a folder with task.yaml, or of such folders; else a value of data.path"
    )
    convert.add_argument("out", metavar="OUT", type=Path, help="folder in which the tasks' folders are written")
    convert.add_argument("--limit", type=int, metavar="N", help="convert only so many tasks, from the start")


def run(arguments: argparse.Namespace) -> None:
    """Show or convert.

    Raises:
        ConfigError: rows or tasks cannot be used; they are printed first.
    """
    option, count, least = (
        ("--limit", arguments.limit, 1) if arguments.action == "convert" else ("--rows", arguments.rows, 0)
    )
    if count is not None and count < least:
        raise ConfigError(f"{option} {count}: at least {least} is needed")
    if arguments.action == "convert":
        _convert(arguments.path, arguments.out, arguments.limit)
    else:
        _show(arguments)


def _convert(path: str, out: Path, limit: int | None) -> None:
    """Write the folders of tasks that can be converted, and name the others."""
    console, folder = make_console(), Path(path).expanduser()
    folders = [folder] if is_terminal_bench(folder) else []
    if folder.is_dir() and not folders:
        folders = sorted(child for child in folder.iterdir() if is_terminal_bench(child))
    table = None if folders else open_table(Path(path), "PATH", None)
    size = len(table) if table is not None else len(folders)
    size = size if limit is None else min(size, limit)
    count, shown_s, faults = 0, time.monotonic(), list[str]()
    try:
        for index in range(size):
            try:
                if table is None:
                    convert_terminal_bench(folders[index], out / folders[index].name)
                else:
                    row = table[index]
                    convert_swe_row(row.values, row.location, out / _folder_name(row))
                count += 1
            except UserError as error:
                faults.append(str(error))
            if time.monotonic() - shown_s > EVERY_S:
                shown_s = time.monotonic()
                print_message(console, f"{index + 1:,} of {size:,} tasks")
    finally:
        for fault in faults[:MOST_FAULTS]:
            console.print(f"bad task: {fault}", style="red", soft_wrap=True)
        console.print(f"{count:,} tasks in {out}", soft_wrap=True)
    if faults:
        raise ConfigError(f"{len(faults):,} of {size:,} tasks cannot be converted")


def _folder_name(row: Row) -> str:
    name = str(row.get("instance_id", "PATH"))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{row.location}: 'instance_id' is {name!r:.80}, which is no name of a folder")
    return name


def _show(arguments: argparse.Namespace) -> None:
    config, has_model = _config(arguments)
    console = make_console()
    renderer = _renderer(config) if has_model else None
    report: _Report = (
        _ChatReport(config, renderer)
        if arguments.sft
        else _TaskReport(config, renderer, has_env=arguments.env is not None)
    )
    assert config.data.path is not None
    table = open_table(config.data.path, KEY, None, config.data.rows_key)
    size = min(len(table), config.data.limit or len(table))
    shown_s, columns = time.monotonic(), tuple[str, ...]()
    try:
        for index in range(size):
            try:
                row = table[index]
                columns = row.columns
                text = report.add(row)
            except UserError as error:
                report.faults.append(str(error))
                continue
            if text is not None and report.count <= arguments.rows:
                console.print(text, soft_wrap=True)
            if time.monotonic() - shown_s > EVERY_S:
                shown_s = time.monotonic()
                print_message(console, f"{index + 1:,} of {size:,} rows")
    finally:  # Ctrl-C: what is known of the rows so far
        _print_summary(report, console)
    if report.faults:
        are_chats = not arguments.sft and config.sft.messages_key in columns
        hint = "; agentrl data show --sft reads rows as chats" if are_chats else ""
        raise ConfigError(f"{len(report.faults):,} of {size:,} rows of {KEY}={config.data.path} cannot be used{hint}")
    if not report.count:
        raise ConfigError(f"{KEY}={config.data.path}: all rows are left out")


def _config(arguments: argparse.Namespace) -> tuple[Config, bool]:
    """Return the configuration, and whether it names a model; without ``--env`` there is no preset."""
    layers = command_line_layers(arguments) if arguments.env is None else config_layers(arguments)
    layers = [*layers, Layer("command line", {"data": {"path": arguments.path}})]
    model = merge_layers(layers).get("model")
    return load_layers(layers), isinstance(model, dict) and model.get("path") is not None


def _renderer(config: Config) -> ChatRenderer:
    return PromptLimit(0, config.model, config.render).renderer()


def _print_summary(report: _Report, console: Console) -> None:
    for fault in report.faults[:MOST_FAULTS]:
        console.print(f"bad row: {fault}", style="red", soft_wrap=True)
    if len(report.faults) > MOST_FAULTS:
        console.print(f"bad row: … and {len(report.faults) - MOST_FAULTS:,} more")
    for name, value in report.summary():
        console.print(f"{name:<13}{value}", soft_wrap=True)


@dataclass(slots=True)
class _Report(ABC):
    """What rows become, and which cannot be used."""

    config: Config
    renderer: ChatRenderer | None
    """Chat renderer of the model that the configuration names; None if it names none."""
    faults: list[str] = field(default_factory=list)
    """Why rows cannot be used, with their places."""
    count: int = 0
    """Rows that can be used."""
    left_out: int = 0
    """Rows that ``data.convert`` and ``data.max_prompt_tokens`` leave out."""
    lengths: list[tuple[int, str]] = field(default_factory=list)
    """Tokens of each row's prompt or chat, and its place."""

    @abstractmethod
    def add(self, row: Row) -> Text | None:
        """Count a row, and return what it becomes; None if it is left out.

        Raises:
            UserError: it cannot be used.
        """

    @abstractmethod
    def summary(self) -> Iterator[tuple[str, str]]:
        """Yield names and values of the last lines."""

    def _lengths(self) -> Iterator[tuple[str, str]]:
        if self.lengths:
            numbers = [length for length, _ in self.lengths]
            longest, location = max(self.lengths, key=lambda row: row[0])
            middle = statistics.median_low(numbers)
            yield "tokens", f"{min(numbers):,} to {longest:,} a row, median {middle:,}; the longest: {location}"
        elif self.renderer is None:
            yield "tokens", "not counted; set model.path to render rows in a model's chat format"
        if self.left_out:
            yield "left out", f"{self.left_out:,} rows, by data.convert or data.max_prompt_tokens"


class _TaskReport(_Report):
    """Rows as tasks."""

    def __init__(self, config: Config, renderer: ChatRenderer | None, *, has_env: bool) -> None:
        super().__init__(config, renderer)
        most = config.data.max_prompt_tokens
        limit = PromptLimit(most, config.model, config.render) if most is not None and renderer is not None else None
        self._convert = RowConversion(config.data, limit)
        self._has_env = has_env
        self._tools: Sequence[Tool] = ()
        self._locations: dict[str, str] = {}
        self._without_label = 0
        self._forgeable = 0
        if has_env:
            from agentrl.runtime.run_tools import policy_tools

            self._tools = policy_tools(config)

    @override
    def add(self, row: Row) -> Text | None:
        task = self._convert(row)
        if task is None:
            self.left_out += 1
            return None
        if (earlier := self._locations.setdefault(task.id, row.location)) != row.location:
            raise ConfigError(
                f"{row.location}: {self.config.data.id_key!r} (data.id_key) is {task.id!r}, as in {earlier}"
            )
        messages, size = self._prompt(task), ""
        text = _message_lines(messages)
        if self.renderer is not None:
            try:
                ids = self.renderer.render(messages, self._tools).token_ids
            except ConversationError as error:
                raise ConfigError(f"{row.location}: the chat format refuses the prompt: {error}") from error
            text, size = self.renderer.decode(ids), f", {len(ids):,} tokens"
            self.lengths.append((len(ids), row.location))
        self.count += 1
        self._without_label += task.answer in (None, "") and not row.is_task_folder
        facts = {"label": task.answer, "metadata": dict(task.metadata)}
        lines = [f"{name:<10}{json.dumps(value, ensure_ascii=False)}" for name, value in facts.items()]
        if row.is_task_folder:
            folder = load_task_folder(row.path)
            self._forgeable += folder.is_forgeable
            lines += [f"{name:<10}{value}" for name, value in describe_task(folder)]
        return Text("\n".join([f"{row.location}: task {task.id}{size}", *lines, text, ""]))

    def _prompt(self, task: Task) -> tuple[Message, ...]:
        """Return the first messages of an episode."""
        if not self._has_env:
            return task.prompt
        from agentrl.train.template_check import first_prompt

        messages = first_prompt(self.config.env, self.config.run.seed, task)
        return tuple(messages) if messages else task.prompt

    @override
    def summary(self) -> Iterator[tuple[str, str]]:
        without = f", {self._without_label:,} of them without a label" if self._without_label else ""
        yield "tasks", f"{self.count:,}{without}"
        if self._forgeable:
            yield "forgeable", f"{self._forgeable:,} tasks, whose tests run in the agent's container"
        if self._has_env:
            yield "tools", ", ".join(tool.name for tool in self._tools) or "none"
        yield from self._lengths()


class _ChatReport(_Report):
    """Rows as chats for supervised fine-tuning."""

    def __init__(self, config: Config, renderer: ChatRenderer | None) -> None:
        super().__init__(config, renderer)
        self._convert = ChatConversion(config.data, config.sft)
        self._tokens = self._trained = 0

    @override
    def add(self, row: Row) -> Text | None:
        chat = self._convert(row)
        if chat is None:
            self.left_out += 1
            return None
        tools = f"; tools: {', '.join(tool.name for tool in chat.tools)}" if chat.tools else ""
        if self.renderer is None:
            self.count += 1
            return Text(
                f"{row.location}: a chat of {len(chat.messages)} messages{tools}\n{_message_lines(chat.messages)}\n"
            )
        text = self._mask_text(chat, self.renderer, f"{row.location}: {{}}{tools}\n")
        self.count += 1
        return text

    def _mask_text(self, chat: Chat, renderer: ChatRenderer, head: str) -> Text:
        """Return the rows of a chat, with trained tokens marked apart from observed ones."""
        from agentrl.sft.chats import chat_rows

        rows = asyncio.run(chat_rows(chat, renderer, self.config.sft.turns)).rows
        sizes = [len(row.token_ids) for row in rows]
        trained = sum(int(row.mask.sum()) for row in rows)
        self.lengths.append((max(sizes), chat.location))
        self._tokens += sum(sizes)
        self._trained += trained
        count = f"{len(rows)} rows, " if len(rows) > 1 else ""
        text = Text(head.format(f"{count}{sum(sizes):,} tokens, {trained:,} of them trained"))
        for row in rows:
            changes = np.flatnonzero(np.diff(row.mask)) + 1
            for start, end in pairwise([0, *changes.tolist(), len(row.mask)]):
                is_trained = bool(row.mask[start])
                text.append(f"--- {'trained' if is_trained else 'observed'}: {end - start} tokens\n", style="dim")
                spoken = renderer.decode(row.token_ids[start:end].tolist())
                text.append(f"{spoken}\n", style="green" if is_trained else "")
        return text

    @override
    def summary(self) -> Iterator[tuple[str, str]]:
        yield "chats", f"{self.count:,}"
        if self.renderer is not None:
            yield "trained", f"{self._trained:,} of {self._tokens:,} tokens"
        yield from self._lengths()


def _message_lines(messages: Sequence[Message]) -> str:
    """Return messages as text, without a chat format."""
    lines = []
    for message in messages:
        calls = "".join(f" calls {call.name}({json.dumps(dict(call.arguments))})" for call in message.tool_calls)
        lines.append(f"{message.role}: {_text_with_images(message)}{calls}")
    return "\n".join(lines)


def _text_with_images(message: Message) -> str:
    """Return the content with type and size of each image at its place."""
    if not message.images:
        return message.content
    start, *texts = message.content.split(IMAGE_MARK)
    labels = [f"[{image.media_type}, {len(image.data):,} bytes]" for image in message.images]
    return start + "".join(image + text for image, text in zip(labels, texts, strict=True))
