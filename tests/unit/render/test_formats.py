"""What holds of every chat format, for conversations of any kind; a format added to FORMATS is tested at once."""

import asyncio
from dataclasses import replace
from functools import cache
from itertools import count

import hypothesis
import numpy as np
import pytest
from hypothesis import given

from agentrl.batch.provenance import check_rows
from agentrl.config.model import RenderConfig
from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.errors import ConversationError
from agentrl.core.task import Task
from agentrl.core.types import CallStatus, Fork, ForkReason, MaskReason, Message, Provenance, SamplingParams, ToolCall
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.render.registry import FORMATS, make_renderer
from agentrl.testing import ScriptedSampler
from tests.unit.render.conversations import TOOLS, Script, added_ids, scripts, turns_of, well_formed
from tests.unit.render.oracles import TEMPLATES, template
from tests.unit.render.tokenizers import MARKERS, family_tokenizer

THINKERS = ("qwen3", "qwen3-thinking", "glm-4.5", "deepseek-r1")
SWITCHED = ("qwen3", "glm-4.5")  # reasoning can be switched off
CASES = {
    **{name: (name, {"format": name}) for name in FORMATS},
    **{f"{name}, kept": (name, {"format": name, "keep_thinking": True}) for name in THINKERS},
    **{f"{name}, off": (name, {"format": name, "thinking": False}) for name in SWITCHED},
    **{f"{name}, off, kept": (name, {"format": name, "thinking": False, "keep_thinking": True}) for name in SWITCHED},
    **{f"template of {name}": (name, {"format": "template"}) for name in TEMPLATES},
}
every_case = pytest.mark.parametrize("case", CASES)


@cache
def family(case):
    """The tokenizer of a case."""
    name, options = CASES[case]
    return family_tokenizer(name, template(name) if options["format"] == "template" else None)


@cache
def renderer_of(case):
    return make_renderer(family(case), RenderConfig(**CASES[case][1]))


@cache
def markers_of(case):
    """The ids that are more than text: special ones, and those that look so."""
    added = family(case).added_tokens_decoder.items()
    return frozenset(index for index, token in added if token.special or "|" in token.content or "｜" in token.content)


def markers_in(case, ids):
    return [index for index in ids if index in markers_of(case)]


def plain(messages):
    """The messages with nothing but a letter in what the policy did not say."""
    return [message if message.token_ids else replace(message, content="x") for message in messages]


def start(renderer, script):
    try:
        return renderer.render(script.first, script.tools).token_ids
    except ConversationError:
        hypothesis.reject()


@every_case
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 4)  # for each of thirty cases
@given(script=scripts())
def test_whatever_is_said_is_kept(case, script: Script):
    """Bridges append to the very ids; content stays text; nothing the policy says is refused."""
    renderer, tokenizer, tools = renderer_of(case), family(case), script.tools
    prompt, history = start(renderer, script), list(script.first)
    assert markers_in(case, prompt) == markers_in(case, renderer.render(plain(history), tools).token_ids)
    for sampled, new in script.turns:
        ids = sampled.ids(tokenizer, renderer.end_token_id)
        message = renderer.parse(ids, tools, prompt_ids=prompt)
        without_end = ids[:-1] if ids[-1] in renderer.end_token_ids else ids
        assert (message.token_ids, message.content) == (without_end, renderer.decode(without_end))
        for call in message.tool_calls:
            assert (call.status is CallStatus.OK) == (call.fault == "")
            assert call.status is not CallStatus.OK or not tools or call.name in {tool.name for tool in tools}
        history.append(message)
        added = added_ids(renderer.bridge(history, ids, new, tools))
        bare = added_ids(renderer.bridge(history, ids, plain(new), tools))
        if isinstance(added, Fork):
            assert added.detail
            prompt = renderer.render([*history, *new], tools).token_ids
            assert markers_in(case, prompt) == markers_in(
                case, renderer.render(plain([*history, *new]), tools).token_ids
            )
        else:
            assert not isinstance(bare, Fork)
            assert markers_in(case, added) == markers_in(case, bare)
            prompt += ids + added
        history += new


THOUGHT_AFTER_TOOLS = (
    Message("user", "a"),
    Message("assistant", "<think>\na\n</think>\n\na", (ToolCall("call_00", "look_up", {"word": "a"}),)),
    Message("tool", "a", tool_call_id="call_00"),
    Message("assistant", "<think>\na\n</think>\n\na"),
    Message("user", "a"),
)
"""DeepSeek R1's template opens no turn after the results of tools: the policy samples the opening of its reasoning there."""


@every_case
@hypothesis.example(conversation=(THOUGHT_AFTER_TOOLS, TOOLS))
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 4)  # for each of thirty cases
@given(conversation=well_formed(reasoning=True))
def test_a_bridge_says_what_the_whole_conversation_says(case, conversation):
    """Of turns in the format's own words: bridged ids are those of a full render, and a fork is one."""
    renderer, tokenizer, format = renderer_of(case), family(case), renderer_of(case).format
    messages, tools = conversation
    indices = turns_of(messages)
    history = list(messages[: indices[0]] if indices else messages)
    prompt = renderer.render(history, tools).token_ids
    flows = False  # whether white space of a turn and of its opener are one token in a full render
    for number, index in enumerate(indices):
        new = messages[index + 1 : indices[number + 1] if number + 1 < len(indices) else len(messages)]
        text = words_of(format, history, messages[index], tools)
        hypothesis.assume(text is not None)
        boundary = format.boundary([*history, replace(messages[index], content=text)], new, tools)
        ends = [end for end in format.ends if isinstance(boundary, str) and boundary.startswith(end)]
        flows = flows or (text[:1].isspace() and renderer.decode(prompt[-1:]).isspace())
        end = tokenizer.convert_tokens_to_ids(ends[0]) if ends else renderer.end_token_id
        ids = (*tokenizer.encode(text, add_special_tokens=False), end)
        message = renderer.parse(ids, tools, prompt_ids=prompt)
        history.append(message)
        added = added_ids(renderer.bridge(history, ids, new, tools))
        history += new
        full = renderer.render(history, tools).token_ids
        if isinstance(added, Fork):
            assert added.reason in (ForkReason.THINKING, ForkReason.TEMPLATE), added
            assert not CASES[case][1].get("keep_thinking"), "keeps everything"
            # The generic format cannot tell what the template left out before: it may render anew what stays as it was.
            assert (
                case.startswith("template")
                or full[: len(prompt) + len(message.token_ids)] != prompt + message.token_ids
            ), added
            prompt = full
        else:
            prompt += ids + added
            assert renderer.decode(prompt) == renderer.decode(full)
            assert flows or prompt == full


def words_of(format, history, message, tools):
    """What a policy would sample, up to its end token, to say ``message``; None where the format cannot tell."""
    try:
        prompt, full_text = format.text(history, tools), format.text([*history, message], tools, opener=False)
    except ValueError:  # such as of two calls, where a turn of the format holds one
        return None
    if not full_text.startswith(prompt):
        return None
    text = full_text[len(prompt) :]
    cut = min((at for end in format.ends if (at := text.find(end)) >= 0), default=len(text))
    return text[:cut]


class Says(Env):
    """Answers in the words of a script, whatever it hears, and ends with it."""

    def __init__(self, script):
        self.tools = script.tools
        self._answers = [new for _, new in script.turns]

    def step(self, action):
        answer = self._answers.pop(0)
        return answer, 0.0, not self._answers, False, {}


@every_case
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 4)  # each plays an episode
@given(script=scripts())
def test_an_episode_trains_exactly_what_was_sampled(case, script: Script):
    renderer, tokenizer = renderer_of(case), family(case)
    start(renderer, script)
    turns = [sampled.ids(tokenizer, renderer.end_token_id) for sampled, _ in script.turns]
    sampler = ScriptedSampler(lambda asked: turns[asked.turn % len(turns)])
    rollout = play(renderer, sampler, script)
    texts_by_request = {asked.request_id: turns[asked.turn % len(turns)] for asked in sampler.requests}
    check_rows(rollout.rows)
    trained = {}
    for number, row in enumerate(rollout.rows):
        assert (row.fork is None) == (number == 0)
        of_policy = row.provenance == Provenance.SAMPLED
        assert (row.requests[of_policy] >= 0).all()
        assert (row.requests[~of_policy] == -1).all()
        assert set(row.mask_reason[of_policy]) <= {MaskReason.NONE, MaskReason.SHARED}
        assert set(row.mask_reason[~of_policy]) <= {MaskReason.OBSERVED}
        for index, request in enumerate(row.request_ids):
            sampled = np.flatnonzero(row.requests == index)
            ids = row.token_ids[sampled].tolist()
            assert ids == list(texts_by_request[request])[: len(ids)], "a fork may share the beginning of a turn"
            trained[request] = trained.get(request, 0) + int(row.mask[sampled].sum())
    assert trained == {request: len(ids) for request, ids in texts_by_request.items()}, "each token once, in one row"
    prompts = {asked.request_id: asked.prompt.token_ids for asked in sampler.requests}
    rows = [tuple(row.token_ids.tolist()) for row in rollout.rows]
    for request, ids in texts_by_request.items():
        full_ids = prompts[request] + ids
        assert any(row[: len(full_ids)] == full_ids for row in rows), "the learner sees what the engine saw"


def play(renderer, sampler, script):
    numbers = count()
    runner = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=lambda: Says(script),
                    renderer=renderer,
                    sampler=sampler,
                    tool_clients={},
                    limits=Limits(6, 100_000, max_seconds=60.0, max_new_tokens=100_000),
                    sampling=SamplingParams(max_new_tokens=100_000),
                )
            )
        },
        FailurePolicy(FailureConfig.model_validate(dict.fromkeys(("environment", "task"), "stop"))),
        EpisodeSlots(1),
    )
    task, texts = Task(f"t{next(numbers)}", script.first), []

    async def run():  # returns nothing: asyncio.run writes the result's repr, a hundredth of a second for each rollout
        texts.extend(await runner.run(task, 0, "e"))

    asyncio.run(run())
    (rollout,) = texts
    assert rollout.failure is None
    return rollout


def test_every_family_has_a_tokenizer():
    assert all(family_tokenizer(name) for name in FORMATS)
    assert len(MARKERS) > 60


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_takes_the_format_that_the_template_writes(name):
    renderer = make_renderer(family_tokenizer(name, template(name)))
    assert renderer.format.name == name
