"""A run's rollouts in the terminal: a table of steps, and rollouts with tokens coloured by provenance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.core.images import Image, ImageSpan
from agentrl.core.types import MaskReason, Provenance, Rollout, Row, SeatRecord
from agentrl.obs.console import TitledBlock, printable
from agentrl.obs.viewer.page import Decode, TokenText
from agentrl.obs.viewer.run_files import Entry, Filters, RunFiles

STEPS = 12
"""Most rows of the table of steps; of more steps it shows evenly spaced ones, including the last."""

HEAD_TAIL = 500
"""Characters shown at each end of a long observation."""

STYLES = {
    (Provenance.SAMPLED, True): "bold green",
    (Provenance.SAMPLED, False): "yellow",
    (Provenance.DEMONSTRATED, True): "bold magenta",
    (Provenance.DEMONSTRATED, False): "magenta",
    (Provenance.OBSERVED, False): "cyan",
    (Provenance.OBSERVED, True): "reverse red",
}
"""Style by provenance and loss mask. Trained observed tokens must not exist, and are highlighted if they do."""

PROMPT = "dim"
_POLICY, _OBSERVED = STYLES[Provenance.SAMPLED, True], STYLES[Provenance.OBSERVED, False]


def steps_table(run: RunFiles, filters: Filters) -> tuple[Table, str]:
    """Return a table of up to `STEPS` steps, and a message if steps are omitted."""
    steps = run.within(filters)
    shown = [steps[len(steps) - 1 - n * len(steps) // STEPS] for n in reversed(range(STEPS))]
    shown = steps if len(steps) <= STEPS else shown
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("step", "rollouts", "groups", "reward", "lowest", "highest", "turns", "tokens", "failed"):
        table.add_column(title, justify="right")
    table.add_column("ended")
    for step in shown:
        rollouts = [entry.rollout for entry in run.read(step, filters)]
        table.add_row(str(step), *_step_cells(rollouts)) if rollouts else table.add_row(str(step), "0")
    words = f"{len(shown)} of {len(steps)} steps, evenly" if len(shown) < len(steps) else ""
    return table, words


def _step_cells(rollouts: Sequence[Rollout]) -> Iterator[str]:
    rewards = [rollout.reward for rollout in rollouts]
    count = len(rollouts)
    failed = sum(rollout.failure is not None or rollout.dropped for rollout in rollouts)
    reasons = [rollout.stop_reason.value for rollout in rollouts]
    yield str(count)
    yield str(len({rollout.prompt_id for rollout in rollouts}))
    yield f"{sum(rewards) / count:.3f}"
    yield f"{min(rewards):g}"
    yield f"{max(rewards):g}"
    yield f"{sum(len(rollout.turns) for rollout in rollouts) / count:.1f}"
    yield f"{sum(len(row.token_ids) for rollout in rollouts for row in rollout.rows) / count:,.0f}"
    yield str(failed) if failed else "–"
    yield ", ".join(
        f"{reason} {reasons.count(reason)}" for reason in sorted(set(reasons), key=reasons.count, reverse=True)
    )


def newest_rollouts(run: RunFiles, filters: Filters, limit: int) -> Iterator[Entry]:
    """Yield up to ``limit`` rollouts that pass the filters, from the last step backwards, reading no more than needed."""
    remaining = limit
    for step in reversed(run.within(filters)):
        for entry in run.read(step, filters)[:remaining]:
            yield entry
            remaining -= 1
        if remaining <= 0:
            return


def rollout_view(entry: Entry, decode: Decode | str) -> RenderableType:
    """Return a titled block with a rollout's text, from its turns if ``decode`` is the reason why tokens have no text."""
    rollout = entry.rollout
    parts: list[RenderableType] = []
    if rollout.failure is not None:
        failure = rollout.failure
        parts.append(Text(f"{failure.kind.value} failure: {failure.error}: {failure.message}", "bold red"))
    if isinstance(decode, str) or not rollout.rows:
        parts.append(_turn_text(rollout))
    else:
        for row in rollout.rows:
            if len(rollout.rows) > 1:
                parts.append(Text(f"— {row_name(row)} —", "bold"))
            parts.append(_row_text(row, token_texts(row, decode), rollout.images))
    parts += [_moves_text(seat) for seat in rollout.seats if not seat.trained]
    parts.append(Text("  ".join(f"{key} {value:g}" for key, value in sorted(rollout.metrics.items())), "yellow"))
    if rollout.label is not None:
        parts.append(Text(f"label {rollout.label}", "yellow"))
    return TitledBlock(headline(entry), *parts)


def legend() -> Text:
    """Return the legend of the colours."""
    return Text.assemble(
        ("prompt", PROMPT),
        "  ",
        ("sampled, trained on", _POLICY),
        "  ",
        ("sampled, masked", STYLES[Provenance.SAMPLED, False]),
        "  ",
        ("demonstrated", STYLES[Provenance.DEMONSTRATED, True]),
        "  ",
        ("observed", _OBSERVED),
    )


def headline(entry: Entry) -> str:
    """Return a summary of a rollout on one line."""
    rollout = entry.rollout
    advantage = "" if entry.advantage is None else f" · advantage {entry.advantage:+.3f}"
    tokens = sum(len(row.token_ids) for row in rollout.rows)
    return (
        f"{rollout.rollout_id} · step {entry.step} · {rollout.prompt_id} · reward {rollout.reward:g}{advantage} · "
        f"{rollout.stop_reason.value} · {len(rollout.turns)} turns · {tokens:,} tokens, {rollout.sampled_tokens:,} sampled"
        + (" · dropped" if rollout.dropped else "")
        + (f" by the filter {rollout.filtered}" if rollout.filtered else "")
    )


def tokens_table(entry: Entry, decode: Decode | str) -> RenderableType:
    """Return a table with one line per token of a rollout."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "id", "text", "provenance", "mask", "log-prob", "ver.", "request", "adv."):
        table.add_column(title, no_wrap=True)
    for row in entry.rollout.rows:
        if len(entry.rollout.rows) > 1:
            table.add_row("", "", Text(row_name(row), "bold"))
        texts = [""] * len(row.token_ids) if isinstance(decode, str) else token_texts(row, decode)
        for index, text in enumerate(texts):
            table.add_row(*_token_cells(entry, row, index, text), style=_style(row, index))
        table.add_section()
    return Group(Text(headline(entry), "bold"), table)


def row_name(row: Row) -> str:
    """Return a row's agent and number, and the reason of a fork."""
    fork = f" · {row.fork.value}" if row.fork else ""
    return f"{row.key.agent_id} {row.key.row}{fork}"


def _token_cells(entry: Entry, row: Row, index: int, text: str) -> list[str]:
    sampled = row.provenance[index] == Provenance.SAMPLED
    trained = bool(row.mask[index])
    request = int(row.requests[index])
    has_request = 0 <= request < len(row.request_ids)
    return [
        str(index),
        str(row.token_ids[index]),
        printable(text, lines=False),
        Provenance(row.provenance[index]).name.lower(),
        "1" if trained else f"0 {MaskReason(row.mask_reason[index]).name.lower()}",
        f"{row.logprobs[index]:.4f}" if sampled else "–",
        str(row.versions[index]) if sampled else "–",
        row.request_ids[request] if has_request else "–",
        f"{entry.advantage:+.3f}" if trained and entry.advantage is not None else "–",
    ]


def _style(row: Row, index: int) -> str:
    return STYLES[Provenance(row.provenance[index]), bool(row.mask[index])]


def _row_text(row: Row, texts: Sequence[str], images: Mapping[str, Image]) -> Text:
    """Return a row's text; the observed tokens before the first sampled one are the prompt."""
    text = Text()

    def decode(start: int, stop: int) -> str:
        return "".join(texts[start:stop])

    start = 0
    while start < len(texts):
        style = _style(row, start)
        end = start + 1
        while end < len(texts) and _style(row, end) == style:
            end += 1
        observed = row.provenance[start] == Provenance.OBSERVED
        words = _text_with_images(row, start, end, decode, images)
        text.append(_abbreviate(words) if observed else words, PROMPT if observed and start == 0 else style)
        start = end
    return text


def _turn_text(rollout: Rollout) -> Text:
    text = Text(_abbreviate(rollout.prompt), PROMPT)
    for turn in rollout.turns:
        text.append(turn.action, _POLICY)
        text.append(_abbreviate(turn.observation), _OBSERVED)
    return text


def _moves_text(seat: SeatRecord) -> Text:
    """Return what an agent did that is not trained."""
    text = Text(f"{seat.agent} ({seat.role}), {seat.player}:", "bold")
    for number, (step, move) in enumerate(zip(seat.steps, seat.moves, strict=False)):
        text.append(f"{' ·' if number else ''} step {step + 1} ", "not bold dim")
        text.append(_abbreviate(move), _OBSERVED)
    return text


def _abbreviate(words: str) -> str:
    left_out = len(words) - 2 * HEAD_TAIL
    if left_out <= HEAD_TAIL:
        return words
    return f"{words[:HEAD_TAIL]} […{left_out:,} characters…] {words[-HEAD_TAIL:]}"


def token_texts(row: Row, decode: Decode) -> list[str]:
    """Return the text of each token; a character of several tokens is the text of the last of them."""
    return joined_texts(decode([int(token) for token in row.token_ids]))


def joined_texts(tokens: Sequence[TokenText]) -> list[str]:
    """Return one text per token; bytes of incomplete characters are joined with the following ones."""
    texts: list[str] = []
    pending = b""
    for token in tokens:
        if isinstance(token, str):
            if pending:
                texts[-1] += pending.decode("utf-8", "replace")
                pending = b""
            texts.append(token)
            continue
        pending += token
        try:
            texts.append(pending.decode("utf-8"))
            pending = b""
        except UnicodeDecodeError as error:
            complete = pending[: error.start].decode("utf-8") if error.reason == "unexpected end of data" else None
            text = pending.decode("utf-8", "replace") if complete is None else complete
            pending = b"" if complete is None else pending[error.start :]
            texts.append(text)
    if pending:
        texts[-1] += pending.decode("utf-8", "replace")
    return texts


def _text_with_images(
    row: Row, start: int, stop: int, decode: Callable[[int, int], str], images: Mapping[str, Image]
) -> str:
    """Return the text of tokens of a row, with one line for each image in place of the text of its tokens.

    Args:
        row: of the tokens.
        start: index of the first token.
        stop: index after the last one.
        decode: returns the text of the tokens between two indices.
        images: of the rollout, by digest.
    """
    texts = []
    for span in row.images:
        if start <= span.start < stop:
            texts += [decode(start, span.start), _image_line(span, images.get(span.digest))]
            start = span.end
    return "".join([*texts, decode(start, stop)])


def _image_line(span: ImageSpan, image: Image | None) -> str:
    """Return a line such as ``[image 9f86d081884c, PNG, 32×32, 1.2 kB, 16 tokens]``."""
    facts = [f"image {span.digest[:12]}"]
    if image is not None:
        facts.append(image.media_type.removeprefix("image/").upper())
        facts += [f"{width}×{height}" for width, height in [image.size] if width]
        facts.append(f"{len(image.data) / 1000:.1f} kB")
    return f"\n[{', '.join(facts)}, {span.length} tokens]\n"


def rollout_panel(rollout: Rollout, title: str, decode: Callable[[Sequence[int]], str]) -> RenderableType:
    """Return a titled block: the prompt dim, what the policy sampled green, what it observed cyan, turn markers included.

    Args:
        rollout: to show; its last row, which has the whole conversation unless it was rewritten.
        title: of the block.
        decode: returns the text of tokens.
    """
    text = Text()
    for row in rollout.rows[-1:]:
        token_ids = row.token_ids.tolist()

        def decode_tokens(start: int, stop: int, token_ids: Sequence[int] = token_ids) -> str:
            return decode(token_ids[start:stop])

        sampled = row.provenance == Provenance.SAMPLED
        cuts = np.flatnonzero(np.diff(sampled, prepend=not sampled[0], append=not sampled[-1]))
        for start, stop in pairwise(cuts.tolist()):
            style = _POLICY if sampled[start] else _OBSERVED if start else PROMPT
            text.append(_text_with_images(row, start, stop, decode_tokens, rollout.images), style)
    if not rollout.rows:
        text = _turn_text(rollout)
    legend = Text.assemble(
        ("prompt", PROMPT), "  ", ("sampled by the policy, trained on", _POLICY), "  ", ("observed, masked", _OBSERVED)
    )
    metrics = "  ".join(f"{key} {value:g}" for key, value in sorted(rollout.metrics.items()))
    end = Text(f"reward {rollout.reward:g}  {rollout.stop_reason.value}  {metrics}", "yellow")
    return TitledBlock(title, text, Text(), end, legend)
