"""``agentrl template check``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, TemplateError
from agentrl.obs.console import make_console

if TYPE_CHECKING:
    from agentrl.render.template_check.check import Findings
    from agentrl.render.template_check.turn_transitions import TurnTransition


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check",
        help="what a tokenizer's chat template does to sampled tokens, and what agentrl does about it",
        description="Say what a tokenizer's chat template does to the tokens that a policy sampled, and what agentrl does "
        "about it. Needs neither network nor weights.",
    )
    check.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="a folder with a tokenizer, a model's name, or a cached hub id",
    )
    check.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="a Jinja file to take for the tokenizer's own"
    )
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.add_argument("overrides", nargs="*", metavar="render.KEY=value", help="settings to check it under")


def run(arguments: argparse.Namespace) -> None:
    """Check and print.

    Raises:
        ConfigError, ModelError, MissingError: something cannot be read.
        TemplateError: no conversation can be trained with the template, or it leaves out the text of messages.
    """
    loaded = _config(arguments)
    from agentrl.models.image_processor import image_processor_loader
    from agentrl.models.load import load_tokenizer, read_end_ids
    from agentrl.models.resolve import resolve_model
    from agentrl.render.template_check.check import check_template

    path = Path(arguments.tokenizer).expanduser()
    folder = path.resolve() if path.is_dir() else resolve_model(arguments.tokenizer, "--tokenizer", fetch=False)
    trust = loaded.model.trust_remote_code
    tokenizer = load_tokenizer(folder, "--tokenizer", trust_remote_code=trust)
    load_images = image_processor_loader(folder, trust_remote_code=trust)
    findings = check_template(tokenizer, loaded.render, read_end_ids(folder), load_images=load_images)
    console = make_console()
    if arguments.json:
        console.print_json(json.dumps({**asdict(findings), "summary": findings.summary()}))
    else:
        _print(findings, console)
    if findings.fault:
        raise TemplateError(f"--tokenizer {arguments.tokenizer}: {findings.fault}")
    if findings.lost:
        raise TemplateError(f"--tokenizer {arguments.tokenizer}: prompts do not have all of {', '.join(findings.lost)}")
    for transition in findings.inexact:
        raise TemplateError(
            f"--tokenizer {arguments.tokenizer}: {transition.turn} before {transition.before}: agentrl writes another text "
            "than was sampled, or than the template writes; set render.format=template"
        )


def _config(arguments: argparse.Namespace) -> Config:
    for override in arguments.overrides:
        if not override.startswith(("render.", "model.trust_remote_code=")):
            raise ConfigError(
                f"{override}: agentrl template check takes settings of the section render, and model.trust_remote_code"
            )
    loaded = load_config(None, arguments.overrides)
    file: Path | None = arguments.chat_template
    if file is None:
        return loaded
    if not file.is_file():
        raise ConfigError(f"--chat-template {file}: there is no such file")
    return loaded.model_copy(update={"render": loaded.render.model_copy(update={"chat_template": file})})


def _print(findings: Findings, console: Console) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, value in _facts(findings):
        facts.add_row(name, value)
    console.print(facts)
    if not findings.transitions:
        return
    table = Table("turn", "before", "the template", "agentrl")
    for transition in findings.transitions:
        table.add_row(transition.turn, transition.before, _template_does(transition), _agentrl_does(transition))
    console.print(table)
    _print_differences(findings, console)


def _facts(findings: Findings) -> list[tuple[str, str]]:
    format_source = "hand-written, as the template has it" if findings.hand_written else "the template itself"
    thought = ", so a turn starts in its reasoning" if findings.opens_thinking else ""
    dropped = ", ".join(findings.drops_thinking)
    split = ", ".join(findings.split_markers)
    return [
        ("format", f"{findings.format} ({format_source})"),
        ("opener", f"{findings.opener!r}{thought}"),
        *_end_facts(findings),
        ("markers", f"no single token: {split}" if split else f"{len(findings.markers)}, each a separate token"),
        ("reasoning", f"left out before {dropped}" if dropped else "kept"),
        ("tool calls", _calls(findings)),
        ("contents", _contents(findings)),
        ("texts", _texts(findings)),
    ]


def _contents(findings: Findings) -> str:
    if not findings.unescaped:
        return "no token is made of their text"
    shown = ", ".join(findings.unescaped[:4]) + (", …" if len(findings.unescaped) > 4 else "")
    return f"text of special tokens stays text, that of {shown} becomes tokens (render.escape_added_tokens)"


def _texts(findings: Findings) -> str:
    verdicts: dict[str, list[str]] = {}
    for kind, arrival in findings.arrivals.items():
        verdicts.setdefault(arrival.value, []).append(kind)
    return "\n".join(f"{verdict}: {', '.join(kinds)}" for verdict, kinds in verdicts.items())


def _calls(findings: Findings) -> str:
    if findings.reads_calls is None:
        return f"parser {findings.parser}; the template writes none"
    if findings.reads_calls:
        return f"parser {findings.parser}, which reads the template's calls"
    other_parsers = ", ".join(f"render.tool_parser={name}" for name in findings.readers)
    return f"parser {findings.parser}, which does not read the template's calls: {other_parsers or 'no parser does'}"


def _end_facts(findings: Findings) -> list[tuple[str, str]]:
    from agentrl.render.template_check.check import Ending

    end = findings.end
    written, stops = " or ".join(end.written), " or ".join(end.stops)
    explanations = {
        Ending.TRAINED: f"{written}: the engine stops there, so it is sampled and trained",
        Ending.OTHER: f"the engine stops at {stops}, the template writes {written}: each turn begins a new row",
        Ending.SPLIT: f"the engine stops at {stops}; the template's {written} is no single token and is never trained",
        Ending.UNKNOWN: f"the engine stops at {stops}; the template shows no end token",
    }
    facts = [("end of turn", explanations[end.ending])]
    if end.after:
        tokens = f"{end.after_tokens} token{'s' if end.after_tokens > 1 else ''}"
        facts.append(("after it", f"{end.after!r}, {tokens}: added to the next prompt, never sampled, never trained"))
    return facts


def _template_does(transition: TurnTransition) -> str:
    if transition.preserved is None:
        return "refuses"
    if transition.preserved:
        return "keeps it"
    if transition.drops_thinking:
        return "never has reasoning" if transition.stable else "drops reasoning"
    return "never has it so" if transition.stable else "changes it"


def _agentrl_does(transition: TurnTransition) -> str:
    from agentrl.render.template_check.turn_transitions import Continuation

    words = {
        Continuation.BRIDGE: "bridge: the row continues" + (", in other words" if transition.exact is False else ""),
        Continuation.KEEP: "keep: the row continues with the reasoning",
        Continuation.FORK: f"fork: a new row ({transition.reason})",
        Continuation.REFUSE: "refuse: the episode ends",
    }
    return words[transition.continuation]


def _print_differences(findings: Findings, console: Console) -> None:
    """Print each difference once, under the first turn that has it, and all refusals."""
    seen: set[object] = set()
    for transition in findings.transitions:
        subject = transition.difference if transition.difference is not None else transition.detail
        if not subject or subject in seen:
            continue
        seen.add(subject)
        console.print(f"\n{transition.turn}, before {transition.before}", style="bold")
        difference = transition.difference
        if difference is not None:
            console.print(f"  was     …{difference.shared + difference.was!r}")
            console.print(f"  is now  …{difference.shared + difference.is_now!r}")
        if transition.detail:
            console.print(f"  {transition.continuation}: {transition.detail}")
