"""Checks of a run before anything is started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from agentrl.algo.registry import describe_algorithm, estimator_class, needs_critic
from agentrl.algo.reward_processing import load_post_process
from agentrl.batch.sample_conversion import load_convert
from agentrl.cluster.placement_layout import check_placement, describe_placement
from agentrl.cluster.ray_address import running_address
from agentrl.config.agent import CONTAINER
from agentrl.config.algo import CriticConfig
from agentrl.config.engine_checks import check_context
from agentrl.config.engine_groups import training_engines
from agentrl.config.learner import LearnerConfig
from agentrl.config.runners import agent_elsewhere, concurrent_episodes, describe_runners
from agentrl.config.schema import Config
from agentrl.config.tasks import DataConfig, EnvConfig
from agentrl.containers.task_needs import check_task_folders
from agentrl.core.errors import ConfigError, MissingError, ModelError
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import env_class
from agentrl.core.task import MadeTasks, Task
from agentrl.data.application_tasks import Placeholders
from agentrl.data.buffer import Epochs
from agentrl.data.file_tasks import TaskStream
from agentrl.data.hub import is_dataset
from agentrl.data.rows import check_file
from agentrl.data.task_sources import (
    Split,
    TaskSources,
    check_not_empty,
    count_epochs,
    errors_name_source,
    make_order,
    open_tasks,
    read_splits,
    split_contents,
)
from agentrl.evaluation.own_function import load_evaluation
from agentrl.evaluation.sets import EvalTasks, check_goals, load_eval_tasks
from agentrl.learner.registry import make_backend
from agentrl.models.learning_rates import LORA_FACTOR, count_weights, usual_rates
from agentrl.models.load import read_max_positions, read_rope_limit, read_routing
from agentrl.models.reference_policy import CRITIC_KEY, check_frozen, check_reference, resolve_critic, resolve_reference
from agentrl.models.resolve import has_chat_template, model_contents, resolve_model
from agentrl.models.shipped_architectures import shipped_architecture
from agentrl.models.weight_files import INDEX, SINGLE, WeightFiles
from agentrl.planner.training_summary import describe_memory, describe_model, describe_training
from agentrl.rewards.grader import check_labels, label_warning
from agentrl.runtime.checks import check_engine, check_episodes, check_packages
from agentrl.runtime.engine_precision import check_precision, read_precision
from agentrl.runtime.judges import resolve_judges
from agentrl.runtime.run_tools import check_tools
from agentrl.train.callbacks import check_callbacks
from agentrl.train.teachers import check_teachers
from agentrl.train.template_check import TRIED, check_chat_template
from agentrl.train.warm_start import describe, warm_start_config

SPECULATIVE_REQUESTS = 48
"""Requests that SGLang runs at the same time with speculative decoding, if ``max_running_requests`` is not set."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The description of a run, and what this machine lacks for it."""

    lines: list[str]
    """Lines that describe the run for the user."""
    missing_resources: list[str]
    """What this machine lacks for the run."""
    warnings: list[str]
    """What is likely to be a mistake, with the key to set."""
    training: list[str] = field(default_factory=list)
    """Lines on what is trained, and how; without a model only its name."""
    template: str = ""
    """One line on the chat template's effect on training; empty if the model is missing."""
    contents: dict[str, str] = field(default_factory=dict)
    """Checksums of the tasks and the model; empty if one is missing."""


def check_run(config: Config) -> Plan:
    """Check everything that needs no server, and describe the run. A model may be fetched.

    Raises:
        UserError: with the value and the key to change.
    """
    plan = plan_run(config, fetch=True)
    if plan.missing_resources:
        raise MissingError("\n".join(plan.missing_resources))
    return plan


def plan_run(config: Config, *, fetch: bool = False) -> Plan:
    """Check everything that needs no server, and list what this machine lacks. A model is fetched only with ``fetch``.

    Raises:
        UserError: with the value and the key to change.
    """
    unmet: list[str] = []
    for name, source_config in config.by_source().items():
        with errors_name_source(name):
            _check_data_files(source_config.data)
    with _collect_missing(unmet):
        check_episodes(config)
        check_comparisons(config)
        check_callbacks(config.train.callbacks)
        load_convert(config.batch.convert)
        load_evaluation(config.eval)
        for name, algo in config.algo.by_source.items():
            with errors_name_source(name):
                load_post_process(algo.reward_post_process)
    with _collect_missing(unmet):
        check_packages(config.learner, config.obs)
    make_backend(config.learner).check(config.algo, [])
    warm = warm_start_config(config, Path())
    sets: list[EvalTasks] | None = None
    train: dict[str, Split] = {}
    length = f"{config.train.steps} steps" if config.train.epochs is None else f"{config.train.epochs:g} epochs"
    with _collect_missing(unmet):
        tasks = open_tasks(config)
        train = _train_tasks(config, tasks)
        if (epochs := count_epochs(config, train)) is not None:
            length = _check_epochs(config, epochs)
        sets = load_eval_tasks(config, tasks, on_access=True)
        for eval_set in sets:
            source_config = config.by_source()[eval_set.plan.source or ""]
            check_labels(source_config.reward, _tasks_to_check(eval_set.tasks))
            check_task_folders(_tasks_to_check(eval_set.tasks), config.containers)
        check_goals(config.train, sets, config.eval.function)
    with _collect_missing(unmet):
        check_tools(config)
    with _collect_missing(unmet):
        check_engine(config, on_cluster=config.placement.reserves_gpus and running_address() is not None)
    with _collect_missing(unmet):
        check_placement(config)
    model = _check_model(config, unmet, fetch=fetch and not unmet)  # no gigabytes for a run that is refused
    template = "" if model is None else _check_templates(config, model, train)
    model_line = describe_model(config.model.path, model)
    warnings = [warning for warning in (shipped_policy_warning(config), speculation_warning(config)) if warning]
    training: list[str] = []
    lines = [*_describe_sources(config, train), model_line, *_describe(config, sets, template, length)]
    if model is None and (architecture := shipped_architecture(config.model.path)) is not None:
        with _collect_missing(unmet):
            lines += _describe_architecture(config, architecture)
    if model is not None:
        critic = resolve_critic(config.algo, model)
        training = describe_training(config, model, critic)
        if runners := describe_runners(config):
            training.append(f"{'episodes':<13}{runners}")
        lines += [*describe_precision(config, model), *training]
        if not fetch:
            lines += describe_memory(config, model, critic)
        sizes = [count_weights(folder) if folder is not None else 0 for folder in (model, critic)]
        warnings += learning_rate_warnings(config.learner, config.algo.critic, *sizes)
    warnings += [
        warning for source in config.by_source().values() if (warning := label_warning(source.reward, source.data))
    ]
    if warm is not None:
        lines.append(f"{'warm start':<13}{config.model.warm_start}: {describe(warm.sft)}")
    contents = split_contents(config, train) | model_contents(model) if train and model is not None else {}
    return Plan(lines, unmet, warnings, [model_line, *training], template, contents)


@contextmanager
def _collect_missing(unmet: list[str]) -> Iterator[None]:
    try:
        yield
    except MissingError as error:
        unmet += str(error).splitlines()


def _check_data_files(data: DataConfig) -> None:
    for key, path in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if path is not None and not is_dataset(path.expanduser()):
            check_file(path.expanduser(), key)


def _tasks_to_check(split: Split) -> Iterable[Task]:
    """Return all tasks of a split, or some if they are read or made on access: to make one may take as long as a game."""
    if isinstance(split, TaskStream):
        return split.sample(TRIED)
    return islice(split, TRIED) if isinstance(split, MadeTasks) else split


def _train_tasks(config: Config, tasks: TaskSources) -> dict[str, Split]:
    """Return the tasks of each source to train on, which the data source takes."""
    splits = read_splits(config, tasks)
    check_not_empty(config, splits)
    for name, source_config in config.by_source().items():
        with errors_name_source(name):
            split = splits[name]
            check_labels(source_config.reward, _tasks_to_check(split))
            check_task_folders(_tasks_to_check(split), config.containers)
    make_order(config, splits)
    return splits


def _check_templates(config: Config, model: Path, train: Mapping[str, Split]) -> str:
    """Return what `check_chat_template` says, once for each source that differs."""
    sources_by_text: dict[str, list[str]] = {}
    for name, source_config in config.by_source().items():
        with errors_name_source(name):
            split = train.get(name, ())
            tasks = split.sample(TRIED) if isinstance(split, TaskStream) else split
            sources_by_text.setdefault(check_chat_template(source_config, model, tasks), []).append(name)
    if len(sources_by_text) == 1:
        return next(iter(sources_by_text))
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in sources_by_text.items())


def _describe_architecture(config: Config, model: Path) -> list[str]:
    """Check a model of which only the shape is here, and return what `describe_memory` does."""
    check_context(config, read_max_positions(model))
    check_precision(config, model)
    critic = resolve_critic(config.algo, model, fetch=False)
    models = [folder for folder in (model, critic) if folder is not None]
    make_backend(config.learner).check(config.algo, models)
    check_rope(config.max_tokens, models)
    return [*describe_precision(config, model), *describe_memory(config, model, critic)]


def check_comparisons(config: Config) -> None:
    """Check that rollouts are compared with others.

    Raises:
        ConfigError: a task has one rollout, and nothing else is trained on.
    """
    if config.rollout.n_samples_per_prompt > 1 or config.algo.trains_everything:
        return
    single = [
        source.algo.advantage.name
        for source in config.by_source().values()
        if (source.rollout.loop is None or source.rollout.agent.brings_tasks)  # a loop may return several rollouts
        and not source.rollout.agent.agents
        and estimator_class(source.algo.advantage).compares_group
        and not issubclass(env_class(source.env.name), MultiAgentEnv)  # its roles are compared
    ]
    if single and not config.algo.distillation.teachers:
        raise ConfigError(
            f"rollout.n_samples_per_prompt=1 with algo.advantage.name={single[0]}: it compares the rollouts of a task, so "
            "nothing would be trained; set rollout.n_samples_per_prompt to 4 or more, or algo.advantage.name=reinforce_plus_plus"
        )


def check_rope(max_tokens: int, models: Sequence[Path]) -> None:
    """Check that positions of a row do not depend on the rows that are packed with it.

    Raises:
        ConfigError: a model's RoPE depends on the longest row, from a length on that rollouts may have.
    """
    for folder in models:
        limit = read_rope_limit(folder)
        if limit is not None and max_tokens > limit:
            raise ConfigError(
                f"rollout.max_tokens={max_tokens}, and the RoPE of the model in {folder} depends on the longest "
                f"of the rows that are computed together if it has more than {limit} tokens; set rollout.max_tokens={limit}, or "
                "choose another model"
            )


def describe_precision(config: Config, model: Path) -> list[str]:
    """Return a line on what the engines have in a smaller precision than bfloat16, if anything."""
    words = "" if config.sampler.urls else str(read_precision(config, model))
    return [f"{'precision':<13}engines: {words}"] if words else []


def _check_model(config: Config, unmet: list[str], *, fetch: bool) -> Path | None:
    """Return the policy's folder, or None if it is missing."""
    model: Path | None = None
    with _collect_missing(unmet):
        model = resolve_model(config.model.path, fetch=fetch)
        for name, source_config in config.by_source().items():
            if (
                source_config.data.path is not None
                and source_config.data.apply_chat_template
                and not has_chat_template(model)
            ):
                key = f"sources.{name}.data" if name else "data"
                raise ConfigError(
                    f"model.path={config.model.path}: {model} has no chat template; set {key}.apply_chat_template=false to give "
                    "it prompts as they are, or model.path to an instruct model"
                )
        check_context(config, read_max_positions(model))
        files = WeightFiles(model, "model.path")  # refuses weights of a dtype that cannot be read
        if not files.specs() and not any(model.glob("pytorch_model*.bin")):
            raise ModelError(f"model.path={config.model.path}: {model} has no weights: neither {SINGLE} nor {INDEX}")
        check_precision(config, model, files)
        if config.algo.replays_routing:
            read_routing(model)
        reference, trusted = resolve_reference(config, fetch=fetch), config.model.trust_remote_code
        if config.algo.reference is not None and reference is not None:
            check_reference(model, reference, trust_remote_code=trusted)
        check_frozen(config, model, fetch=fetch)
        resolve_judges(config, fetch=fetch)
        critic = resolve_critic(config.algo, model, fetch=fetch)
        if critic is not None:
            check_reference(model, critic, CRITIC_KEY, trust_remote_code=trusted)
        models = [folder for folder in (model, critic, reference) if folder is not None]
        make_backend(config.learner).check(config.algo, models)
        check_rope(config.max_tokens, models)
        check_teachers(config, model, fetch=fetch)
    return model


def shipped_policy_warning(config: Config) -> str:
    """Return a warning if the policy is that of agentrl's own task because ``model.path`` is not set; else ""."""
    environments = {source.env.name for source in config.by_source().values()} - {EnvConfig().name}
    if not environments or "path" in config.model.model_fields_set:
        return ""
    return (
        f"warning: model.path is not set, so the policy is {config.model.path}, which agentrl ships for {EnvConfig().name} and "
        f"which has read nothing else; set model.path to a model for {', '.join(sorted(environments))}"
    )


def speculation_warning(config: Config) -> str:
    """Return a warning if SGLang would run fewer requests at the same time because of speculative decoding; else ""."""
    sampler, key = config.sampler, "max_running_requests"
    episodes = -(-concurrent_episodes(config) // training_engines(sampler))
    if (
        not sampler.speculative_algorithm
        or sampler.urls
        or sampler.sglang_option(key)
        or episodes <= SPECULATIVE_REQUESTS
    ):
        return ""
    return (
        f"warning: sampler.sglang.speculative_algorithm={sampler.speculative_algorithm} without {key}: SGLang then runs "
        f"{SPECULATIVE_REQUESTS} requests at the same time, and an engine has up to {episodes}; set "
        f"sampler.sglang.{key}={episodes}"
    )


def learning_rate_warnings(
    learner: LearnerConfig, critic: CriticConfig, count: int, critic_count: int = 0
) -> list[str]:
    """Return warnings if the learning rate of the policy, of ``count`` weights, or of the critic is many times the usual."""
    rates = {"learner.optimizer": (learner.optimizer.lr, count)}
    rates["algo.critic.optimizer"] = (critic.optimizer.lr, critic_count)
    warnings = []
    for key, (lr, weights) in rates.items():
        usual = usual_rates(weights)
        factor = LORA_FACTOR if key == "learner.optimizer" and learner.lora is not None else 1
        if lr != "auto" and lr > usual.highest * factor:
            rate = usual.policy * factor if key == "learner.optimizer" else usual.critic_or_sft
            warnings.append(
                f"warning: {key}.lr={lr:g} is many times the usual {rate:g} for a model of {weights / 1e9:.2g} billion "
                f"weights, and may destroy it: set {key}.lr={rate:g} and {key}.warmup_steps"
            )
    return warnings


def _describe_sources(config: Config, train: Mapping[str, Split]) -> list[str]:
    """Return lines on environment, tasks and reward; of a mixed run one for each source."""
    by_source, lines = config.by_source(), []
    for name, source_config in by_source.items():
        origin = source_config.data.path or source_config.tasks.name or "of the environment"
        if source_config.rollout.agent.brings_tasks:
            origin = "of the application"
        facts = {
            "environment": source_config.env.name,
            "tasks": f"{origin}: {_to_train_on(train.get(name))}",
            "reward": ", ".join(source_config.reward.by_name) or "the environment's",
        }
        if not name:
            return [f"{key:<13}{value}" for key, value in facts.items()]
        share = config.sources[name].weight / sum(source.weight for source in config.sources.values())
        text = ", ".join(f"{key} {value}" for key, value in facts.items())
        lines.append(
            f"{'source':<13}{name}: {share:.0%} of the tasks, {text}, {describe_algorithm(source_config.algo)}"
        )
    return lines


def _to_train_on(split: Split | None) -> str:
    if isinstance(split, TaskStream):
        return f"{'rows' if split.size is None else f'{split.size} rows'}, read when their tasks are taken"
    if isinstance(split, Placeholders):
        return "those that its sessions bring"
    return "not there yet" if split is None else f"{len(split)} to train on"


def _check_epochs(config: Config, epochs: Epochs) -> str:
    """Return the length of a run with ``train.epochs``, once it is checked that it trains the policy."""
    steps, limit = epochs.limit // config.rollout.batch_size, config.train.steps
    critic = config.algo.critic
    if needs_critic(config.algo) and critic.warmup_steps >= steps:
        raise ConfigError(
            f"algo.critic.warmup_steps={critic.warmup_steps} with train.epochs={epochs.count:g}, which are {steps} steps: the "
            "policy is never trained; lower algo.critic.warmup_steps"
        )
    text = f"{steps} steps ({epochs.count:g} epochs of {epochs.tasks} tasks)"
    if limit is not None and limit < steps:
        text = f"{limit} steps, as train.steps ends the run before {text}"
    filters = config.rollout.filter_groups.filters
    return text + (", fewer if rollout.filter_groups drops groups" if filters else "")


def _describe(config: Config, sets: list[EvalTasks] | None, template: str, length: str) -> list[str]:
    rollout, plan, sampler = config.rollout, config.train, config.sampler
    algorithm = "an algorithm for each source" if config.sources else describe_algorithm(config.algo)
    lines = {
        "engine": (
            sampler.url or sampler.backend + (f", {count} of them" if (count := training_engines(sampler)) > 1 else "")
        )
        + "".join(f", {group.engines} for {name} ({group.serves})" for name, group in sampler.groups.items())
        + (", behind sglang-router" if sampler.has_router_program else ""),
        "step": f"{rollout.batch_size} prompts x {rollout.n_samples_per_prompt} = "
        f"{rollout.batch_size * rollout.n_samples_per_prompt} episodes",
        "learner": f"{config.learner.backend}, {config.learner.ranks} rank(s), {algorithm}",
        "length": length,
    }
    if template:
        lines["template"] = template
    if config.placement.reserves_gpus:
        lines["placement"] = describe_placement(config)
    if rollout.generate is not None and not config.sources:
        lines["generate"] = rollout.generate
    if (agent := agent_elsewhere(config)) is not None:
        lines["agent"] = f"runs elsewhere, and starts sessions at {agent.url}/v1/sessions"
    elif rollout.agent.setting is not None and not config.sources:
        lines["agent"] = rollout.agent.command or rollout.agent.harness or ""
        if rollout.agent.sandbox == CONTAINER:
            lines["agent"] += ", in the machine of each task"
        elif rollout.agent.sandbox is not None:
            lines["agent"] += f", in a sandbox of {rollout.agent.sandbox}"
    times = ["before the first step"] if plan.eval_first else []
    times += [f"every {plan.eval_every} steps"] if plan.eval_every else []
    every = ", ".join([*times, "after the last step"])
    if config.eval.function is not None:
        evaluation = [f"{every}: {config.eval.function}"]
    elif sets:
        evaluation = [f"{every}: {eval_set.description}" for eval_set in sets]
    elif sets is None:
        evaluation = [every]
    else:
        evaluation = ["off: there are no tasks to evaluate on (data.eval_path, eval.path or eval.sets names some)"]
    return [f"{name:<13}{value}" for name, value in lines.items()] + [
        f"{'evaluation':<13}{line}" for line in evaluation
    ]
