"""What a tokenizer's chat template does to the tokens that a policy sampled, and what agentrl does about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from transformers import PreTrainedTokenizerBase

from agentrl.config.render import RenderConfig
from agentrl.core.types import ForkReason
from agentrl.render.formats.template import TemplateFormat
from agentrl.render.parsers.base import THINK, THINK_END
from agentrl.render.parsers.registry import PARSERS
from agentrl.render.registry import choose_format, make_renderer
from agentrl.render.template_check.turn_transitions import MARKER, Crossing, Outcome, Scene, cross_all

_SHORT = {"a user message": "user messages", "a tool result": "tool results", "two tool results": "tool results"}


class Ending(StrEnum):
    """What becomes of the token that ends the policy's turns."""

    TRAINED = "trained"
    """The engine stops at the token that the template writes: it is sampled, and so it is in the loss."""
    OTHER = "other"
    """The engine stops at another token than the template writes."""
    SPLIT = "split"
    """What the template writes is no single token, so nothing can stop at it."""
    UNKNOWN = "unknown"
    """The template does not show one."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How the policy's turns end."""

    written: tuple[str, ...]
    """What the template writes there; several where it depends on what follows."""
    stops: tuple[str, ...]
    """The tokens that the engine stops at."""
    ending: Ending
    """How the two go together."""
    after: str
    """What the template writes between the end token and the next turn; never sampled."""
    after_tokens: int
    """The tokens of it."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A piece of the chat format that is meant as one token."""

    text: str
    """What it says."""
    tokens: int
    """How many tokens the tokenizer makes of it."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What `check_template` found."""

    format: str
    """What ``render.format`` calls the format that agentrl takes."""
    hand_written: bool
    """Whether it is agentrl's own code for it; otherwise the template itself."""
    opener: str
    """What asks the policy to speak."""
    opens_thinking: bool
    """Whether that ends with ``<think>``."""
    end: TurnEnd
    """How turns end."""
    markers: tuple[Marker, ...]
    """In the order in which they appear."""
    parser: str
    """What ``render.tool_parser`` calls the parser that reads tool calls; the format's name where only it has it."""
    reads_calls: bool | None
    """Whether it reads the calls that the template writes; None where it writes none."""
    readers: tuple[str, ...]
    """All parsers that do, by ``render.tool_parser``."""
    crossings: tuple[Crossing, ...]
    """What happens to each kind of turn before each kind of message."""
    fault: str
    """Why no conversation can be trained; empty where some can."""

    @property
    def split_markers(self) -> tuple[str, ...]:
        """Markers that the tokenizer cuts into several tokens."""
        return tuple(marker.text for marker in self.markers if marker.tokens > 1)

    @property
    def drops_thinking(self) -> tuple[str, ...]:
        """What makes the template leave earlier reasoning out."""
        return tuple(dict.fromkeys(crossing.before for crossing in self.crossings if crossing.drops_thinking))

    def summary(self) -> str:
        """Return all that matters in one line."""
        if self.fault:
            return f"{self.format}: cannot be used for conversations: {self.fault}"
        name = f"{self.format}, {'hand-written' if self.hand_written else 'generic'}"
        unread = ", which does not read the template's" if self.reads_calls is False else ""
        return f"{name}; {self._rows()}; {self._ends()}; tool calls: {self.parser}{unread}"

    def _ends(self) -> str:
        written, stop = " or ".join(self.end.written), self.end.stops[0]
        if self.end.ending is Ending.TRAINED:
            return f"turns end with {written}, which is trained"
        if written:
            return f"turns end with {stop}, where the template writes {written}"
        return f"turns end with {stop}, and the template shows no end"

    def _rows(self) -> str:
        """Return when a new row begins. System messages between turns are too rare to be told of."""
        usual = [crossing for crossing in self.crossings if crossing.before in _SHORT]
        forks = [crossing for crossing in usual if crossing.outcome is Outcome.FORK]
        always = _words(crossing for crossing in forks if crossing.reason is not ForkReason.THINKING)
        thinking = _words(crossing for crossing in forks if crossing.reason is ForkReason.THINKING)
        told = [f"a new row before {always}"] if always else []
        told += [f"a new row before {thinking} once there is reasoning"] if thinking and thinking != always else []
        kept = any(crossing.outcome is Outcome.KEEP for crossing in usual)
        told = told or ["one row an episode, earlier reasoning kept" if kept else "one row an episode"]
        results = [crossing.outcome for crossing in usual if crossing.before == "a tool result"]
        told += ["no tool results"] if set(results) == {Outcome.REFUSE} else []
        return ", ".join(told)


def check_template(tokenizer: PreTrainedTokenizerBase, config: RenderConfig | None = None) -> Findings:
    """Return what dummy conversations show of a tokenizer's chat template under a ``render`` section.

    Args:
        tokenizer: the policy's; its chat template is replaced where ``render.chat_template`` names another.
        config: the ``render`` section; its defaults if None.

    Raises:
        ConfigError: ``render.chat_template`` cannot be read.
        ModelError: the tokenizer lacks the tokens of ``render.format``, or has no end token.
    """
    config = config or RenderConfig()
    renderer = make_renderer(tokenizer, config)
    shown = "template" if config.format == "auto" and tokenizer.chat_template else config.format
    written = choose_format(tokenizer, config.model_copy(update={"format": shown, "keep_thinking": False}))
    scene = Scene(tokenizer, renderer, written)
    crossings = cross_all(scene)
    callers = [turn for turn in scene.turns if turn.calls]
    names = (name for name, make in PARSERS.items() if type(make()) is type(renderer.parser))
    return Findings(
        format=renderer.format.name,
        hand_written=not isinstance(renderer.format, TemplateFormat),
        opener=scene.opener,
        opens_thinking=renderer.format.opens_thinking,
        end=_end(scene),
        markers=_markers(scene),
        parser=next(names, renderer.format.name),
        reads_calls=all(scene.reads(turn, renderer.parser) for turn in callers) if callers else None,
        readers=tuple(name for name, make in PARSERS.items() if all(scene.reads(turn, make()) for turn in callers)),
        crossings=crossings,
        fault=_fault(scene, crossings),
    )


def _end(scene: Scene) -> TurnEnd:
    written, after = scene.ends, scene.after
    stops = tuple(scene.renderer.decode((index,)) for index in scene.renderer.end_token_ids)
    if not written:
        ending = Ending.UNKNOWN
    elif any(len(scene.ids(text)) != 1 for text in written):
        ending = Ending.SPLIT
    else:
        ending = Ending.TRAINED if set(written) <= set(stops) else Ending.OTHER
    return TurnEnd(written, stops, ending, after, len(scene.ids(after)))


def _markers(scene: Scene) -> tuple[Marker, ...]:
    seen = "".join(scene.texts)
    parser = [marker for marker in scene.renderer.parser.markers if marker in seen]
    thought = [mark for mark in (THINK, THINK_END) if mark in scene.thoughtless]
    found = [*scene.ends, *MARKER.findall(seen), *parser, *thought]
    return tuple(Marker(text, len(scene.ids(text))) for text in dict.fromkeys(found))


def _fault(scene: Scene, crossings: tuple[Crossing, ...]) -> str:
    if not scene.opener:
        return scene.refusal
    spoken = [crossing for crossing in crossings if crossing.turn != "tool call"]
    if all(crossing.outcome is Outcome.REFUSE for crossing in spoken):
        return next((crossing.detail for crossing in spoken if crossing.detail), "it has no turn of an assistant")
    return ""


def _words(crossings: Iterable[Crossing]) -> str:
    return " and ".join(dict.fromkeys(_SHORT[crossing.before] for crossing in crossings))
