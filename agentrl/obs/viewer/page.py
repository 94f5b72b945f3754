"""One self-contained HTML page of a run's rollouts; it needs no network and no server.

The index of all rollouts is parsed at once; the tokens of a rollout are unpacked when it is opened. Text of rollouts is
untrusted: the page contains it only as JSON with every ``<`` escaped, or packed; the script inserts it as text nodes; and a
content security policy allows only the page's own script, and images that the page itself contains.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any

from agentrl.obs.metrics import read_metrics
from agentrl.obs.viewer.page_data import Index, Vocabulary, image_urls, json_bytes, pack_rollout
from agentrl.obs.viewer.run_files import Entry, RunFiles

TokenText = str | bytes
"""A token's text, or its bytes if they are not whole characters."""

Decode = Callable[[Sequence[int]], list[TokenText]]
"""Returns the text of each id, such that the concatenated texts are the text of all ids."""

MODULES = ("dom.js", "rollouts.js", "tokens.js", "detail.js", "group.js", "agents.js")
"""Modules of the view of a rollout, its group and its episode; `agentrl.dashboard` serves them as they are."""

SCRIPTS = (*MODULES, "data.js", "select.js", "list.js", "curve.js", "app.js")
"""Files of the page's script, concatenated in this order, without the imports and exports of the modules."""

STYLES = ("rollout.css", "page.css")
"""Files of the page's style; the first is that of the modules."""

_MODULE_SYNTAX = re.compile(r"^(?:import .*;$|export )", re.MULTILINE)

CURVE_POINTS = 2000
"""Most steps of ``metrics.jsonl`` in the page, evenly spaced; steps with an evaluation are all kept."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page and its size."""

    html: bytes
    """Content of the file."""
    rollouts: int
    """Number of rollouts."""
    tokens: int
    """Number of tokens."""


def describe_run(run: RunFiles) -> dict[str, str]:
    """Return facts about a run for the page's header, by name."""
    keys = {
        "environment": "env.name",
        "tasks": "tasks.name",
        "model": "model.path",
        "algorithm": "algo.advantage.name",
        "seed": "run.seed",
    }
    options = {name: _value(run.config, key) for name, key in keys.items()}
    return {name: str(value) for name, value in options.items() if value is not None}


def _value(config: object, key: str) -> object:
    """Return the value of a key; None if there is none, also because a file that is no run's has a value for a section."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def build_page(
    entries: Iterable[Entry],
    *,
    title: str,
    decode: Decode | str,
    about: Mapping[str, str] | None = None,
    metrics: Sequence[Mapping[str, float]] = (),
    notes: Sequence[str] = (),
) -> Page:
    """Return the page.

    Args:
        entries: the rollouts; consumed one by one.
        title: name of the run.
        decode: decodes tokens, or the reason why they cannot be decoded; the page then shows the reason and the ids.
        about: facts about the run, by name.
        metrics: rows of ``metrics.jsonl`` for the curves.
        notes: messages about omitted data; shown at the top.
    """
    index, vocabulary = Index(), Vocabulary()
    packed: list[str] = []
    images: dict[str, str] = {}
    tokens = 0
    for entry in entries:
        packed.append(base64.b64encode(pack_rollout(entry.rollout, vocabulary)).decode())
        index.add(entry, len(packed[-1]))
        new_images = {digest: image for digest, image in entry.rollout.images.items() if digest not in images}
        images |= image_urls(new_images.values())
        tokens += sum(len(row.token_ids) for row in entry.rollout.rows)
    curve, left_out = curve_data(metrics)
    head = {
        "title": title,
        "about": dict(about or {}),
        "notes": [*notes, *left_out],
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "curve": curve,
        **index.data(),
    }
    parts = {
        "title": html.escape(title),
        "index": _script_safe(head),
        "vocabulary": _script_safe(vocabulary_data(vocabulary.ids, decode)),
        "images": _script_safe(images),
        "blobs": "".join(packed),
    }
    return Page(_assemble(parts), len(index), tokens)


def write_page(out: Path, page: Page) -> None:
    """Write a page.

    Raises:
        OSError: the file cannot be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(page.html)


def run_metrics(run: RunFiles) -> list[dict[str, float]]:
    """Return the rows of the run's ``metrics.jsonl``."""
    return read_metrics(run.folder / "metrics.jsonl")


def curve_data(rows: Sequence[Mapping[str, float]]) -> tuple[dict[str, Any], list[str]]:
    """Return ``{"steps": […], "series": {key: [value or None, …]}}`` and messages about omitted steps."""
    notes = []
    rows = sorted(rows, key=itemgetter("step"))  # with eval.background, an evaluation is written after later steps
    stride = -(-len(rows) // CURVE_POINTS)
    if stride > 1:
        notes.append(f"The curves show every {stride}th step of {len(rows):,}, and all evaluations.")
        numbered_rows = enumerate(rows)
        rows = [row for n, row in numbered_rows if n % stride == 0 or any(key.startswith("eval/") for key in row)]
    keys = sorted(
        {key for row in rows for key, value in row.items() if key != "step" and isinstance(value, int | float)}
    )
    series = {key: [row.get(key) for row in rows] for key in keys}
    return {"steps": [row["step"] for row in rows], "series": series}, notes


def vocabulary_data(ids: Sequence[int], decode: Decode | str) -> dict[str, Any]:
    """Return ids and their texts: text, a list of bytes that are not whole characters, or null with the reason in ``why``."""
    if isinstance(decode, str):
        return {"ids": list(ids), "texts": None, "why": decode}
    texts = [text if isinstance(text, str) else list(text) for text in decode(ids)]
    assert len(texts) == len(ids), f"{len(ids)} ids, {len(texts)} texts"
    return {"ids": list(ids), "texts": texts, "why": ""}


def _script_safe(value: Any) -> str:
    """Return JSON that is safe in a script element: no text in it can end the element or start a comment."""
    text = json_bytes(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _assemble(parts: Mapping[str, str]) -> bytes:
    assets = files("agentrl.obs.viewer") / "assets"
    style = "\n".join((assets / name).read_text("utf-8") for name in STYLES)
    source = "\n".join((assets / name).read_text("utf-8") for name in SCRIPTS)
    script = "'use strict';\n(() => {\n" + _MODULE_SYNTAX.sub("", source) + "\n})();\n"
    sources = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    values = {**parts, "style": style, "script": script, "policy": policy}
    template = (assets / "page.html").read_text(encoding="utf-8")
    pieces = template.split("{{")
    page = [pieces[0]]
    for piece in pieces[1:]:
        name, _, text_after = piece.partition("}}")
        page += [values[name], text_after]
    return "".join(page).encode()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
