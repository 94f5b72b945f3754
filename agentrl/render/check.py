"""What a tokenizer's chat template does to the tokens that a policy sampled, and what agentrl does about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from transformers import PreTrainedTokenizerBase

from agentrl.config.render import RenderConfig
from agentrl.render.choice import choose_format, make_renderer
from agentrl.render.crossings import MARKER, Crossing, Outcome, Scene, cross_all
from agentrl.render.formats.template import TemplateFormat
from agentrl.render.parsers.base import THINK, THINK_END
from agentrl.render.parsers.choice import PARSERS
from agentrl.types import CallStatus, ForkReason


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
    """What ``render.tool_parser`` calls the parser that reads tool calls."""
    reads_calls: bool | None
    """Whether it reads the calls that the template writes; None where it writes none."""
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
        written, stops = self.end.written, self.end.stops
        if self.end.ending is Ending.TRAINED:
            end = f"turns end with {' or '.join(written)}, which is trained"
        elif written:
            end = f"turns end with {stops[0]}, where the template writes {' or '.join(written)}"
        else:
            end = f"turns end with {stops[0]}, and the template shows no end"
        return f"{name}; {self._rows()}; {end}; tool calls: {self.parser}"

    def _rows(self) -> str:
        forks = [crossing for crossing in self.crossings if crossing.outcome is Outcome.FORK]
        if any(crossing.outcome is Outcome.KEEP for crossing in self.crossings):
            return "one row an episode, earlier reasoning kept"
        thinking = [crossing.before for crossing in forks if crossing.reason is ForkReason.THINKING]
        others = [crossing.before for crossing in forks if crossing.reason is not ForkReason.THINKING]
        if others:
            return f"a new row before {_words(others)}"
        if thinking:
            return f"a new row before {_words(thinking)} once there is reasoning"
        return "one row an episode"


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
    return Findings(
        format=renderer.format.name,
        hand_written=not isinstance(renderer.format, TemplateFormat),
        opener=scene.opener,
        opens_thinking=renderer.format.opens_thinking,
        end=_end(scene),
        markers=_markers(scene),
        parser=next(name for name, make in PARSERS.items() if type(make()) is type(renderer.parser)),
        reads_calls=_reads_calls(scene),
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
    found = [*scene.ends, *MARKER.findall(seen), *parser, *(mark for mark in (THINK, THINK_END) if mark in seen)]
    return tuple(Marker(text, len(scene.ids(text))) for text in dict.fromkeys(found))


def _reads_calls(scene: Scene) -> bool | None:
    turns = [turn for turn in scene.turns if turn.calls]
    if not turns:
        return None
    read = [scene.renderer.parse(scene.ids(turn.body), scene.tools).tool_calls for turn in turns]
    return all(
        [(call.name, call.arguments, call.status) for call in calls]
        == [(call.name, call.arguments, CallStatus.OK) for call in turn.calls]
        for calls, turn in zip(read, turns, strict=True)
    )


def _fault(scene: Scene, crossings: tuple[Crossing, ...]) -> str:
    if not scene.opener:
        return scene.refusal
    if all(crossing.outcome is Outcome.REFUSE for crossing in crossings):
        return next((crossing.detail for crossing in crossings if crossing.detail), "it refuses every second turn")
    return ""


def _words(befores: list[str]) -> str:
    words = list(dict.fromkeys(befores))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
