"""Named tools without a class: which run where, episodes of several turns, and the reward of their answers."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from agentrl_envs.tools import ToolsEnv
from byte_renderer import byte_renderer

from agentrl import Message, Task
from agentrl.config.load import load_config, read_yaml
from agentrl.config.rollout import FailureConfig
from agentrl.core.errors import TaskError, UserError
from agentrl.core.named_tools import find_tools
from agentrl.core.registry import make_env
from agentrl.core.types import Rollout, SamplingParams, StopReason
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.rewards.grader import make_grader
from agentrl.runtime.run_tools import policy_tools, private_files, run_services, service_options
from agentrl.testing import ScriptedSampler, check_env

BARE = (Path(__file__).parents[1] / "toolserver" / "bare_mcp_server.py").resolve()
NAME = "agentrl_envs.tools:ToolsEnv"
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = '''
from typing import Annotated, Literal
from agentrl import tool
from agentrl_tools.calculator import CalculatorService

class Other(CalculatorService):
    name = "other"

def price(item: str, unit: Literal["kg", "piece"] = "kg", at: int | None = None) -> float:
    """Return the price of an item.

    Args:
        item: what is sold.
    """
    return {"figs": 7.5}[item]

@tool(timeout_s=3, name="count")
async def count_letters(text: Annotated[str, "any text"]) -> int:
    """Count letters."""
    return len(text)

def untyped(item): ...
async def price_again(item: str) -> str:
    return item
price_again.__name__ = "price"
number = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tools.py"
    path.write_text(TOOLS)
    return path


def test_the_schema_of_a_function_is_that_of_its_annotations(file: Path) -> None:
    named = find_tools(
        ["calculator", f"{file}:price", f"{file}:count_letters", "mcp:files", f"{file}:Other"], "env.tools"
    )
    assert named.servers == ("calculator", "mcp:files", f"{file}:Other")
    price, count = named.functions
    assert (price.name, price.description, count.name, count.timeout_s) == (
        "price",
        "Return the price of an item.",
        "count",
        3,
    )
    properties = price.parameters["properties"]
    assert properties["item"] == {"description": "what is sold.", "type": "string"}
    assert properties["unit"] == {"default": "kg", "enum": ["kg", "piece"], "type": "string"}
    assert properties["at"] == {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}
    assert price.parameters["required"] == ["item"]
    assert count.parameters["properties"]["text"]["description"] == "any text"
    assert find_tools(f"{file}:price", "env.tools").functions[0] is price, "made once"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["calculatr"], "unknown tool 'calculatr'.*Did you mean 'calculator'"),
        (["calculator", "calculator"], "KEY has calculator twice"),
        (["FILE:price", "FILE:price_again"], "are tools of the name 'price'"),
        (["FILE:number"], "my_tools.py:number is 3, and neither a function nor"),
        (["FILE:untyped"], "my_tools.py:untyped: untyped: parameter 'item' has no type hint"),
        (["FILE:nothing"], "KEY=.*my_tools.py has no 'nothing'"),
        ([{"name": "calculator"}], "KEY=.*must be a list of names"),
    ],
)
def test_names_that_are_no_tools(file: Path, names: list[Any], message: str) -> None:
    in_file = [name.replace("FILE", str(file)) if isinstance(name, str) else name for name in names]
    with pytest.raises(UserError, match=message):
        find_tools(in_file, "KEY")


def test_it_keeps_the_contract_of_environments(file: Path) -> None:
    assert (
        check_env(lambda: make_env(NAME, {"tools": [f"{file}:price"], "stop": ["."], "system": "Be brief."}))
        is not None
    )


def test_the_short_form_merges_with_other_options(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "env: {name: tools, tools: [a], options: {system: x}}\nsources: {s: {env: {tools: b}}}"
    )
    tree = read_yaml(tmp_path / "run.yaml")
    assert tree["env"] == {"name": "tools", "options": {"system": "x", "tools": ["a"]}}
    assert tree["sources"]["s"]["env"] == {"options": {"tools": "b"}}
    config = load_config(None, ["env.tools=[calculator]", "env.options.system=x"])
    assert config.env.options == {"tools": ["calculator"], "system": "x"}


def test_servers_are_those_of_the_names_and_their_tools_those_of_the_run(file: Path) -> None:
    files = f"tools.mcp:files.options={{command: [{sys.executable}, -S, {BARE}], prefix: files_}}"
    config = load_config(
        None, [f"env.name={NAME}", f"env.tools=[calculator, mcp:files, {file}:price]", files, "reward=numeric"]
    )
    services = run_services(config)
    assert [*services] == ["calculator", "mcp:files"]
    offered = {tool.name: tool.server for tool in policy_tools(config)}
    assert offered.pop("files_count") == "mcp:files"
    assert {name: server for name, server in offered.items() if not name.startswith("files_")} == {
        "price": "",
        "calculator": "calculator",
    }
    launched = services["mcp:files"].launch_arguments(
        service_options(config, "mcp:files", services["mcp:files"]), None, file.parent
    )  # type: ignore[arg-type]
    server = read_yaml(Path(launched[0].removeprefix("--config=")))
    assert server["tools"]["mcp:files"]["prefix"] == "files_"
    assert private_files(config)[file] == "run's env.options.tools.2"


def test_system_messages() -> None:
    question = Message("user", "q")
    tasks = Task("a", (question,)), Task("b", (Message("system", "own"), question))
    for system, expected in (("", [(question,), tasks[1].prompt]), ("Say {system}", ["Say", "Say own"])):
        env = ToolsEnv(system=system)
        prompts = [env.reset(seed=0, options={"task": task})[0] for task in tasks]
        assert prompts == expected or [prompt[0].content for prompt in prompts] == expected  # type: ignore[index]
    with pytest.raises(TaskError, match="task 'b' has a system message"):
        ToolsEnv(system="Be brief.").reset(seed=0, options={"task": tasks[1]})


def play(
    file: Path, turns: list[str], *, label: str = "15", stop: str = "", max_turns: int = 3
) -> tuple[Rollout, ScriptedSampler]:
    """Return the graded rollout of an episode in which the policy says these turns."""
    settings = [f"env.name={NAME}", f"env.tools=[{file}:price]", "reward=numeric", f"env.options.stop='{stop}'"]
    config = load_config(None, settings)
    renderer = byte_renderer(CHATML)
    sampler = ScriptedSampler(turns, encode=renderer.encode, end_token_id=renderer.end_token_id)
    context = EpisodeContext(
        lambda: make_env(NAME, config.env.options),
        renderer,
        sampler,
        {},
        Limits(max_turns, 10**6, 60.0, 10**6),
        SamplingParams(),
    )
    runner = EpisodeRunner(
        {"": EpisodeSettings(context, grader=make_grader(config.reward))},
        FailurePolicy(FailureConfig()),
        EpisodeSlots(1),
    )
    task = Task("t", (Message("user", "2 kg of figs?"),), answer=label)
    [rollout] = asyncio.run(runner.run_many([Job(task, 0, "1/0/0")]))
    return rollout, sampler


CALL = 'I look.<tool_call>{"name": "price", "arguments": {"item": "figs"}}</tool_call>'


@pytest.mark.parametrize(
    ("turns", "reward", "reason", "final"),
    [
        ([CALL, "So it is 15."], 1.0, StopReason.TERMINATED, "So it is 15."),
        ([CALL, "So it is 7.5."], 0.0, StopReason.TERMINATED, "So it is 7.5."),
        (["15"], 1.0, StopReason.TERMINATED, "15"),
        (
            [CALL, '15<tool_call>{"name": "prize", "arguments": {}}</tool_call>', "15 or 16"],
            0.0,
            StopReason.TERMINATED,
            "15 or 16",
        ),
        ([CALL.replace("I look.", "15"), CALL.replace("figs", "15"), "15" + CALL], 0.0, StopReason.MAX_TURNS, ""),
    ],
)
def test_the_reward_is_that_of_the_answer_and_of_nothing_else(
    file: Path, turns: list[str], reward: float, reason: StopReason, final: str
) -> None:
    rollout, _ = play(file, turns)
    assert (rollout.reward, rollout.stop_reason, rollout.metadata["agent_answer"]) == (reward, reason, final)
    assert len(rollout.turns) == len(turns)
    if len(turns) > 1:
        assert rollout.turns[0].observation == "7.5"
        assert rollout.tool_uses["price"].calls == sum("price" in turn for turn in turns)
    [row] = rollout.rows
    renderer = byte_renderer(CHATML)
    spoken = [renderer.decode(row.token_ids[row.mask == 1].tolist())]
    assert spoken == ["".join(f"{turn}<|im_end|>" for turn in turns)]


def test_a_stop_string_ends_a_turn_and_stays_in_it(file: Path) -> None:
    rollout, sampler = play(file, [CALL, "It is 15</answer>"], stop="</answer>")
    assert (rollout.reward, rollout.metadata["agent_answer"]) == (1.0, "It is 15</answer>")
    assert rollout.turns[-1].action == "It is 15</answer>"
    assert [request.params.stop for request in sampler.requests] == [("</answer>",)] * 2
