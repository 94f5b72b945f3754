"""What can be known to be wrong before anything is started."""

from __future__ import annotations

from importlib.util import find_spec

from agentrl.config.schema import Config
from agentrl.env import Env
from agentrl.errors import ConfigError
from agentrl.models.resolve import resolve_model
from agentrl.registry import env_class, make_env, make_tasks, tool_service
from agentrl.task import TaskSet
from agentrl.tasksource import EnvTasks


def open_tasks(config: Config) -> TaskSet:
    """Return the taskset of the configuration, or the environment's own tasks where none is named.

    Raises:
        ConfigError, UnknownNameError: there is none, or its options do not fit.

    """
    if config.tasks.name is not None:
        return make_tasks(config.tasks.name, config.tasks.options)
    cls = env_class(config.env.name)
    if cls.tasks.__func__ is Env.tasks.__func__:  # type: ignore[attr-defined]
        raise ConfigError(
            f"env.name={config.env.name} brings no tasks of its own: set tasks.name, or define tasks(split, seed) on it"
        )
    return EnvTasks(cls, config.run.seed)


def check_run(config: Config) -> list[str]:
    """Check everything that needs no server, and return in a few lines what would run.

    Raises:
        UserError: with the value and the key to change.

    """
    make_env(config.env.name, config.env.options)
    for name in env_class(config.env.name).tool_names:
        tool_service(name)
    tasks = open_tasks(config)
    task_name = config.tasks.name or "of the environment"
    train, evals = tasks.split(config.tasks.train_split), tasks.split(config.tasks.eval_split)
    for key, split in ((config.tasks.train_split, train), (config.tasks.eval_split, evals)):
        if len(split) == 0:
            raise ConfigError(f"tasks.name={config.tasks.name}: the split {key!r} is empty")
    if config.eval.size is not None and config.eval.size > len(evals):
        raise ConfigError(
            f"eval.size={config.eval.size}, but the split {config.tasks.eval_split!r} has {len(evals)} tasks; lower eval.size"
        )
    model = resolve_model(config.model.path)
    check_engine(config)
    episodes = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return [
        f"environment  {config.env.name}",
        f"tasks        {task_name}: {len(train)} to train on, {config.eval.size or len(evals)} to evaluate",
        f"model        {config.model.path} ({model})",
        f"engine       {config.sampler.url or config.sampler.backend}",
        f"step         {config.rollout.batch_size} prompts x {config.rollout.n_samples_per_prompt} = {episodes} episodes",
        f"learner      {config.learner.backend}, {config.learner.workers} worker(s), {config.algo.name}",
        f"length       {config.train.steps} steps, evaluation every {config.train.eval_every}",
    ]


def check_engine(config: Config) -> None:
    """Refuse an engine that is not installed, naming what to install or set."""
    if config.sampler.backend == "sglang" and config.sampler.url is None and find_spec("sglang") is None:
        raise ConfigError(
            "sampler.backend=sglang, but SGLang is not installed here: pip install 'agentrl[sglang]', "
            "or set sampler.url to a running server, or sampler.backend=embedded"
        )
    if config.sampler.backend == "embedded" and config.rollout.max_tokens > config.sampler.embedded.context:
        raise ConfigError(
            f"rollout.max_tokens={config.rollout.max_tokens} is more than the engine holds: "
            f"raise sampler.embedded.context={config.sampler.embedded.context}"
        )
