"""Questions about a picture: the policy sees it small, may look at parts of it, and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from agentrl import (
    Action,
    CallStatus,
    ConfigError,
    Env,
    Info,
    Message,
    Observation,
    Step,
    Task,
    TaskError,
    Tool,
    ToolCall,
    ToolResults,
)
from agentrl.core.images import IMAGE_MARK, load_image

from .picture import BOX_UNITS, box_fault, crop_picture, encode

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

PICTURE, QUESTION = "{picture}", "{question}"
PROMPT = (
    "{picture}\n{question}\n\nThe tool `zoom` shows a part of the picture larger. Answer with a number, a color, a cell such as "
    "B3, or `equal`, and nothing else."
)
ZOOM = Tool(
    "zoom",
    "Show a part of the picture larger.",
    {
        "type": "object",
        "properties": {
            "box": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": BOX_UNITS},
                "minItems": 4,
                "maxItems": 4,
                "description": "Left, top, right and bottom of the part, from 0 to 1000 across the whole picture.",
            }
        },
        "required": ["box"],
        "additionalProperties": False,
    },
)
NO_ZOOMS = "no zooms are left: answer the question"
"""Answer to a call beyond the limit."""
_WHOLE = (0, 0, BOX_UNITS, BOX_UNITS)


class GeometryEnv(Env):
    """The policy's first turn without a call is its answer, and ends the episode: 1 if it is the task's answer, else 0.

    The last message of a task's prompt has one image. The policy sees it with a longer side of ``view_px`` pixels, and parts of
    it that it zooms on in the same size, cut from the task's image.
    """

    handles_tool_calls: ClassVar[bool] = True

    def __init__(self, *, view_px: int = 448, max_zooms: int = 4, prompt: str = PROMPT) -> None:
        """Set sizes, limit and prompt.

        Args:
            view_px: longer side of what the policy sees, in pixels.
            max_zooms: calls of an episode that are answered with a picture.
            prompt: the prompt around ``{picture}`` and ``{question}``.

        Raises:
            ConfigError: an option is out of range.
        """
        if view_px < 8:
            raise ConfigError(f"env.options.view_px is {view_px}; it must be at least 8")
        if max_zooms < 0:
            raise ConfigError(f"env.options.max_zooms is {max_zooms}; it must be at least 0")
        if prompt.count(PICTURE) != 1 or QUESTION not in prompt or IMAGE_MARK in prompt:
            raise ConfigError(f"env.options.prompt must have {{picture}} once and {{question}} in it: {prompt[:80]!r}")
        self.view_px = view_px
        self.max_zooms = max_zooms
        self.prompt = prompt
        self.tools = (ZOOM,) if max_zooms else ()
        self._begin()

    def _begin(self) -> None:
        self._zooms = self._refused = 0
        self._match = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode; the observation is the question with the picture, small.

        Raises:
            TaskError: the task has not one image, or no answer.
        """
        super().reset(seed=seed, options=options)
        self._begin()
        images = self.task.prompt[-1].images if self.task.prompt else ()
        if len(images) != 1 or not isinstance(self.task.answer, str):
            raise TaskError(
                f"task {self.task.id!r} needs one image and a str as its answer; it has {len(images)} images and "
                f"the answer {self.task.answer!r:.80}"
            )
        try:
            self._picture: PilImage = images[0].to_pil()
        except ValueError as error:
            raise TaskError(f"task {self.task.id!r}: {error}") from None
        question = self.task.question.replace(IMAGE_MARK, "").strip()
        # A question may contain {picture}.
        text = IMAGE_MARK.join(part.replace(QUESTION, question) for part in self.prompt.split(PICTURE))
        shown = encode(crop_picture(self._picture, _WHOLE, self.view_px))
        return (*self.task.prompt[:-1], Message("user", text, images=(shown,))), self._info()

    def step(self, action: Action) -> Step:
        """Answer the policy's calls, or score its answer."""
        assert not isinstance(action, ToolResults), "the environment requests no calls"
        if action.tool_calls:
            observation = tuple(self._answer_call(call) for call in action.tool_calls)
            return observation, 0.0, False, False, self._info()
        self._match = float(_normalize(action.content) == _normalize(self.task.answer))
        return (), self._match, True, False, self._info()

    def _answer_call(self, call: ToolCall) -> Message:
        fault = self._fault(call)
        if fault:
            self._refused += 1
            return Message("tool", fault, tool_call_id=call.id)
        self._zooms += 1
        shown = encode(crop_picture(self._picture, call.arguments["box"], self.view_px))
        return Message("tool", IMAGE_MARK, tool_call_id=call.id, images=(shown,))

    def _fault(self, call: ToolCall) -> str:
        if call.status is not CallStatus.OK:
            return call.fault or call.status.value
        if call.name != ZOOM.name or not self.tools:
            return f"there is no tool {call.name!r}"
        if fault := ZOOM.schema_fault(call.arguments):
            return fault
        if self._zooms >= self.max_zooms:
            return NO_ZOOMS
        return box_fault(call.arguments["box"])

    def _info(self) -> Info:
        """Return the metrics so far: they must be correct at every point, since the runner may truncate the episode."""
        return {
            "metrics": {
                "exact_match": self._match,
                "zooms": float(self._zooms),
                "refused_zooms": float(self._refused),
            }
        }

    @classmethod
    def example_task(cls) -> Task:
        """Return a question about a picture of one color."""
        from PIL import Image as pil

        red = load_image(pil.new("RGB", (64, 64), (214, 40, 40)))
        return Task("example", (Message("user", f"{IMAGE_MARK}Which color is this?", images=(red,)),), answer="red")

    def get_state(self) -> dict[str, Any]:
        """Return the episode's state, serializable as JSON; the picture is the task's."""
        return {**super().get_state(), "zooms": self._zooms, "refused": self._refused, "match": self._match}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned, after a `reset` on the same task."""
        super().set_state(state)
        self._zooms, self._refused, self._match = state["zooms"], state["refused"], state["match"]


def _normalize(answer: str) -> str:
    return answer.strip().rstrip(".").casefold()
