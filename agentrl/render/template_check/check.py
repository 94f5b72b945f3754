"""Check of a chat template: how it changes sampled tokens, and how agentrl continues conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from transformers import PreTrainedTokenizerBase

from agentrl.config.model import RenderConfig
from agentrl.core.types import THINK, THINK_END, ForkReason
from agentrl.models.image_processor import ImageProcessor
from agentrl.render.formats.template import TemplateFormat
from agentrl.render.parsers.registry import PARSERS
from agentrl.render.probes import Arrival, arrivals
from agentrl.render.registry import choose_format, make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.render.template_check.turn_transitions import (
    SPECIAL_TOKEN_LIKE,
    Continuation,
    TemplateProbe,
    TurnTransition,
    find_transitions,
)

_SHORT = {"a user message": "user messages", "a tool result": "tool results", "two tool results": "tool results"}


class Ending(StrEnum):
    """Relation of the template's end of turn to the engine's stop tokens."""

    TRAINED = "trained"
    """The engine stops at the token that the template writes: it is sampled and trained on."""
    OTHER = "other"
    """The engine stops at another token than the template writes."""
    SPLIT = "split"
    """The template's end of turn is not a single token, so the engine cannot stop at it."""
    UNKNOWN = "unknown"
    """The template writes no recognisable end token."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of the policy's turns."""

    written: tuple[str, ...]
    """End tokens in the template's text; several if they depend on the next message."""
    stops: tuple[str, ...]
    """Tokens at which the engine stops."""
    ending: Ending
    """Relation of the two."""
    after: str
    """Text between the end token and the next turn; never sampled."""
    after_tokens: int
    """Number of tokens of that text."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A string of the chat format that should be one token."""

    text: str
    """The string."""
    tokens: int
    """Number of tokens of the string."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of `check_template`."""

    format: str
    """Name of the format that agentrl uses, as in ``render.format``."""
    hand_written: bool
    """Whether the format is implemented in agentrl; otherwise the chat template itself is used."""
    opener: str
    """Text before a turn of the policy."""
    opens_thinking: bool
    """Whether the opener ends with ``<think>``."""
    end: TurnEnd
    """The end of turns."""
    unescaped: tuple[str, ...]
    """Added tokens whose text in contents becomes the token; see ``render.escape_added_tokens``."""
    markers: tuple[Marker, ...]
    """Markers of the format, in order of occurrence."""
    parser: str
    """Name of the tool-call parser, as in ``render.tool_parser``; the format's name if only the format has it."""
    reads_calls: bool | None
    """Whether the parser reads the template's tool calls; None if the template writes none."""
    readers: tuple[str, ...]
    """All parsers that read them, by ``render.tool_parser``."""
    transitions: tuple[TurnTransition, ...]
    """The transition of each kind of turn to each kind of next message."""
    arrivals: Mapping[str, Arrival]
    """What becomes of each kind of text in the prompt."""
    fault: str
    """Why no conversation can be trained on; empty if some can."""

    @property
    def lost(self) -> tuple[str, ...]:
        """Kinds of texts that the format leaves out without an error. An episode that has one fails."""
        return tuple(kind for kind, arrival in self.arrivals.items() if arrival is Arrival.LOST)

    @property
    def needless_forks(self) -> tuple[TurnTransition, ...]:
        """Transitions at which a new row begins although the template keeps what was sampled."""
        return tuple(
            transition
            for transition in self.transitions
            if transition.preserved
            and transition.continuation is Continuation.FORK
            and transition.reason is not ForkReason.END_TOKEN  # that of the tokenizer is not that of the template
            and self._reads(transition)
        )

    @property
    def inexact(self) -> tuple[TurnTransition, ...]:
        """Transitions at which agentrl writes another text than was sampled, or than the template writes."""
        return tuple(
            transition
            for transition in self.transitions
            if (transition.exact is False and self._reads(transition)) or transition.verbatim is False
        )

    def _reads(self, transition: TurnTransition) -> bool:
        """Return whether the turn is read as what it is: without its calls, it is another turn."""
        return transition.turn != "tool call" or self.reads_calls is True

    @property
    def split_markers(self) -> tuple[str, ...]:
        """Markers that are several tokens."""
        return tuple(marker.text for marker in self.markers if marker.tokens > 1)

    @property
    def drops_thinking(self) -> tuple[str, ...]:
        """Kinds of next messages before which the template drops earlier reasoning."""
        return tuple(dict.fromkeys(transition.before for transition in self.transitions if transition.drops_thinking))

    def summary(self) -> str:
        """Return the results on one line."""
        if self.fault:
            return f"{self.format}: cannot be used for conversations: {self.fault}"
        name = f"{self.format}, {'hand-written' if self.hand_written else 'generic'}"
        lost = f"; left out of prompts: {', '.join(self.lost)}" if self.lost else ""
        unread = ", which does not read the template's" if self.reads_calls is False else ""
        return f"{name}; {self._rows()}; {self._ends()}; tool calls: {self.parser}{unread}{lost}"

    def _ends(self) -> str:
        written, stop = " or ".join(self.end.written), self.end.stops[0]
        if self.end.ending is Ending.TRAINED:
            return f"turns end with {written}, which is trained"
        if written:
            return f"turns end with {stop}, the template writes {written}"
        return f"turns end with {stop}, the template shows no end"

    def _rows(self) -> str:
        """Return when a new row begins; system messages between turns are rare and omitted."""
        usual = [transition for transition in self.transitions if transition.before in _SHORT]
        forks = [transition for transition in usual if transition.continuation is Continuation.FORK]
        always = _words(transition for transition in forks if transition.reason is not ForkReason.THINKING)
        thinking = _words(transition for transition in forks if transition.reason is ForkReason.THINKING)
        summary = [f"a new row before {always}"] if always else []
        summary += [f"a new row before {thinking} once there is reasoning"] if thinking and thinking != always else []
        keeps_reasoning = any(transition.continuation is Continuation.KEEP for transition in usual)
        summary = summary or ["one row an episode, earlier reasoning kept" if keeps_reasoning else "one row an episode"]
        results = [transition.continuation for transition in usual if transition.before == "a tool result"]
        summary += ["no tool results"] if set(results) == {Continuation.REFUSE} else []
        return ", ".join(summary)


def check_template(
    tokenizer: PreTrainedTokenizerBase,
    config: RenderConfig | None = None,
    end_ids: Sequence[int] = (),
    *,
    load_images: Callable[[], ImageProcessor] | None = None,
) -> Findings:
    """Return properties of a tokenizer's chat template under a ``render`` section, found with probe conversations.

    Args:
        tokenizer: tokenizer of the policy; ``render.chat_template``, if set, replaces its chat template.
        config: the ``render`` section; its defaults if None.
        end_ids: the model's own end tokens.
        load_images: loads the model's image processor; None if it reads text only.

    Raises:
        ConfigError, ModelError, MissingError: see `agentrl.render.registry.make_renderer`.
    """
    config = config or RenderConfig()
    return check_renderer(make_renderer(tokenizer, config, end_ids, load_images=load_images), tokenizer, config)


def check_renderer(renderer: ChatRenderer, tokenizer: PreTrainedTokenizerBase, config: RenderConfig) -> Findings:
    """Return what `check_template` does.

    Args:
        renderer: made by `agentrl.render.registry.make_renderer`.
        tokenizer: of the renderer.
        config: of the renderer.

    Raises:
        ModelError: see `agentrl.render.registry.choose_format`.
    """
    template = renderer.format
    if config.keep_thinking or (config.format == "auto" and not isinstance(template, TemplateFormat)):
        format_name = "template" if config.format == "auto" and tokenizer.chat_template else config.format
        template = choose_format(tokenizer, config.model_copy(update={"format": format_name, "keep_thinking": False}))
    probe = TemplateProbe(tokenizer, renderer, template)
    transitions = find_transitions(probe)
    callers = [turn for turn in probe.turns if turn.calls]
    names = (name for name, make in PARSERS.items() if type(make()) is type(renderer.parser))
    return Findings(
        format=renderer.format.name,
        hand_written=not isinstance(renderer.format, TemplateFormat),
        opener=probe.opener,
        opens_thinking=renderer.format.opens_thinking,
        end=_end(probe),
        unescaped=renderer.unescaped_tokens,
        markers=_markers(probe),
        parser=next(names, renderer.format.name),
        reads_calls=all(probe.reads(turn, renderer.parser) for turn in callers) if callers else None,
        readers=tuple(name for name, make in PARSERS.items() if all(probe.reads(turn, make()) for turn in callers)),
        transitions=transitions,
        arrivals=arrivals(renderer.format) if probe.begins else {},
        fault=_fault(probe, transitions),
    )


def _end(probe: TemplateProbe) -> TurnEnd:
    written, text_after = probe.ends, probe.text_after_end
    stops = tuple(probe.renderer.decode((index,)) for index in probe.renderer.end_token_ids)
    if not written:
        ending = Ending.UNKNOWN
    elif any(len(probe.ids(text)) != 1 for text in written):
        ending = Ending.SPLIT
    else:
        ending = Ending.TRAINED if set(written) <= set(stops) else Ending.OTHER
    return TurnEnd(written, stops, ending, text_after, len(probe.ids(text_after)))


def _markers(probe: TemplateProbe) -> tuple[Marker, ...]:
    all_text = "".join(probe.texts)
    parser = [marker for marker in probe.renderer.parser.markers if marker in all_text]
    think_tags = [mark for mark in (THINK, THINK_END) if mark in probe.thoughtless]
    markers = [*probe.ends, *SPECIAL_TOKEN_LIKE.findall(all_text), *parser, *think_tags]
    return tuple(Marker(text, len(probe.ids(text))) for text in dict.fromkeys(markers))


def _fault(probe: TemplateProbe, transitions: tuple[TurnTransition, ...]) -> str:
    if not probe.begins:
        return probe.refusal
    after_reasoning = [transition for transition in transitions if transition.turn != "tool call"]
    if all(transition.continuation is Continuation.REFUSE for transition in after_reasoning):
        return next(
            (transition.detail for transition in after_reasoning if transition.detail), "it has no turn of an assistant"
        )
    return ""


def _words(transitions: Iterable[TurnTransition]) -> str:
    return " and ".join(dict.fromkeys(_SHORT[transition.before] for transition in transitions))
