"""Check of what a run needs of the model's chat template, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.config.tasks import EnvConfig
from agentrl.core.env import AsyncEnv
from agentrl.core.errors import ConfigError, ConversationError, ModelError
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import env_class, make_any_env
from agentrl.core.task import Task
from agentrl.core.types import Message, Observation
from agentrl.core.user_code import user_error
from agentrl.runtime.run_tools import policy_tools

TRIED = 32
"""Most tasks whose first prompt is tried, evenly spaced; a run is refused if all of them fail."""


def check_chat_template(config: Config, model: Path, tasks: Sequence[Task]) -> str:
    """Return one line on what the model's chat template does to sampled tokens.

    Raises:
        ConfigError: the template refuses the first prompts, or leaves out something that the environment needs.
        ModelError: there is no template, and the prompts need one.
    """
    # takes half a second to import, and a refused run does not need it
    from agentrl.models.image_processor import image_processor_loader
    from agentrl.models.load import load_tokenizer, read_end_ids
    from agentrl.render.probes import Arrival
    from agentrl.render.registry import make_renderer
    from agentrl.render.template_check.check import check_renderer

    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(model, trust_remote_code=trust)
    if config.data.path is not None and not config.data.apply_chat_template:
        bos = tokenizer.bos_token if tokenizer.encode("a")[:1] == [tokenizer.bos_token_id] else None
        without_bos = (
            f"; they get no {bos}, with which the tokenizer starts texts: write it into the prompts" if bos else ""
        )
        return f"not used: prompts are given as they are (data.apply_chat_template=false){without_bos}"
    end_ids, load_images = read_end_ids(model), image_processor_loader(model, trust_remote_code=trust)
    renderer = make_renderer(tokenizer, config.render, end_ids, load_images=load_images)
    findings = check_renderer(renderer, tokenizer, config.render)
    if config.rollout.loop is not None:  # what it sends is known when it sends it
        return findings.summary()
    refused = list[ConversationError | ModelError]()
    tried = [tasks[index] for index in range(0, len(tasks), -(-len(tasks) // TRIED) or 1)]
    prompts = [prompt for task in tried if (prompt := first_prompt(config.env, config.run.seed, task))]
    tools, too_long = policy_tools(config), 0
    for prompt in prompts:
        try:
            too_long += len(renderer.render(prompt, tools).token_ids) >= config.rollout.max_tokens
        except (ConversationError, ModelError) as error:
            refused.append(error)
    if refused and len(refused) == len(prompts):
        raise refused[0] if isinstance(refused[0], ModelError) else ConfigError(f"no task can begin: {refused[0]}")
    limit = f"no room to answer within rollout.max_tokens={config.rollout.max_tokens}"
    if too_long and too_long == len(prompts):
        raise ConfigError(f"all {too_long} prompts that were tried leave {limit}; raise it, or shorten the prompts")
    answers = not env_class(config.env.name).handles_tool_calls and config.rollout.max_turns > 1
    arrival = findings.arrivals.get("tool results", Arrival.REFUSED)
    if tools and answers and arrival is not Arrival.ARRIVES:
        does = "leaves out" if arrival is Arrival.LOST else "refuses"
        raise ConfigError(
            f"env.name={config.env.name} has tools, but the chat format {findings.format} of model.path={config.model.path} "
            f"{does} tool results; set render.chat_template to a template that has them, or model.path to another model"
        )
    shown = renderer.tool_preamble is not None or renderer.arrival.names_tools
    unnamed = [
        tool.name for tool in tools if not any(tool.name in message.content for prompt in prompts for message in prompt)
    ]
    hidden = (
        ""
        if shown or not unnamed
        else (
            f"; it has no place for tools, so the policy never reads {', '.join(unnamed)} of env.name={config.env.name}: set "
            "render.tool_preamble=true to describe them in the system message, or render.chat_template"
        )
    )
    long = f"; {too_long} of {len(prompts)} prompts that were tried leave {limit}, and are dropped" if too_long else ""
    return findings.summary() + hidden + long


def first_prompt(config: EnvConfig, seed: int, task: Task) -> tuple[Message, ...]:
    """Return the messages that begin an episode, or an empty tuple if only the episode can show them."""
    env = make_any_env(config.name, config.options)
    if isinstance(env, AsyncEnv):
        return task.prompt if type(env).areset is AsyncEnv.areset else ()
    try:
        observation: Observation
        if isinstance(env, MultiAgentEnv):
            views, _ = env.reset(seed=seed, options={"task": task})
            observation = views[env.acting[0]]["messages"]
        else:
            observation, _ = env.reset(seed=seed, options={"task": task})
    except BaseException as error:  # of the environment's author: an episode's failure when it happens
        user_error(error)
        return ()
    finally:
        env.close()
    return observation if isinstance(observation, tuple) else ()
