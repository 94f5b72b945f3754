"""Rules between keys: what a configuration can get wrong although every value fits its own key.

`check` holds for every command; `agentrl.config.engine_checks` has the rules of engines and weight sync,
`agentrl.algo.registry` those of what algorithms declare, and transports have theirs (`Transport.faults`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from string import Formatter

from agentrl.config.agent import CONTAINER, AgentConfig, ProgramConfig
from agentrl.config.algo import AlgoConfig
from agentrl.config.engine_checks import engine_faults
from agentrl.config.evaluation import EvalConfig
from agentrl.config.rewards import POLICY
from agentrl.config.runners import runner_faults
from agentrl.config.sampler import SamplerConfig
from agentrl.config.schema import Config
from agentrl.config.self_play import PAST
from agentrl.core.errors import ConfigError
from agentrl.core.imports import is_reference
from agentrl.core.lineup import MAIN

Rule = Callable[[Config], Iterable[str]]
"""Returns a line for each fault of a configuration: the keys, their values, and what to set."""


def check(config: Config, rules: Sequence[Rule] = ()) -> None:
    """Check the rules that hold for every command, and further ones.

    Raises:
        ConfigError: one line for each violated rule, with the keys and a setting that fits.
    """
    faults = [
        *run_and_source_faults(config, _task_and_reward),
        *_agent_address(config),
        *_eval_sets(config.eval, config.sources),
        *_sft(config),
        *_epochs(config),
        *_whole_steps(config),
        *_algo(config.algo, config.sampler),
        *_distillation(config),
        *_batches(config),
        *runner_faults(config),
        *engine_faults(config),
        *_self_play(config),
        *_frozen_roles(config),
        *_judge_engines(config),
        *_adapter_policies(config),
        *(fault for rule in rules for fault in rule(config)),
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def endpoint_faults(config: Config) -> Iterator[str]:
    """Rule of commands that train: a model at an endpoint has no tokens to train on."""
    endpoint = config.model.endpoint
    if endpoint is not None:
        yield (
            f"model.endpoint.url={endpoint.url}: a model at an endpoint can be evaluated (agentrl eval, agentrl rollout), and "
            "not trained; leave out model.endpoint and set model.path"
        )


def run_and_source_faults(config: Config, rule: Rule) -> list[str]:
    """Return the faults of the run by a rule, and those of its sources that the run does not have."""
    faults = [*rule(config)]
    for name, source_config in config.by_source().items() if config.sources else ():
        faults += [f"sources.{name}: {fault}" for fault in rule(source_config) if fault not in faults]
    return faults


def _task_and_reward(config: Config) -> Iterator[str]:
    """Rules of sections that sources have too."""
    data, tasks, reward, overlong = config.data, config.tasks, config.reward, config.algo.overlong
    files = {"data.path": data.path, "data.eval_path": data.eval_path}
    settings = [f"{key}={path}" for key, path in files.items() if path is not None]
    if settings and tasks.name is not None:
        yield (
            f"{' and '.join(settings)} and tasks.name={tasks.name} both say where tasks are; to use the files, set "
            "tasks.name=null"
        )
    if reward.key is not None and reward.function is None:
        yield f"reward.key={reward.key} is set, but no reward.function to return a mapping"
    yield from _agent(config)
    yield from _seat_programs(config)
    if config.rollout.agent.brings_tasks:
        yield from _application_tasks(config)
    if overlong.max_tokens is not None and overlong.buffer_tokens > overlong.max_tokens:
        yield (
            f"algo.overlong.buffer_tokens={overlong.buffer_tokens} is more than algo.overlong.max_tokens="
            f"{overlong.max_tokens}"
        )


def _agent(config: Config) -> Iterator[str]:
    agent, generate = config.rollout.agent, config.rollout.generate
    if agent.setting is None:
        if agent != AgentConfig():
            yield "keys of rollout.agent are set, but no rollout.agent.command, rollout.agent.harness or rollout.agent.port"
        return
    if len(agent.settings) > 1:
        yield f"{' and '.join(agent.settings)} all say what plays the episodes; leave out all but one"
    defaults = AgentConfig()
    idle = ("cwd", "files", "sandbox", "env", "answer") if agent.is_elsewhere else ("host", "idle_timeout_s", "tasks")
    for key in idle:
        if getattr(agent, key) != getattr(defaults, key):
            kind = "a program that the run starts" if agent.is_elsewhere else "an agent elsewhere (rollout.agent.port)"
            yield f"rollout.agent.{key}={getattr(agent, key)} is for {kind}, and {agent.setting} is set; leave it out"
    if generate is not None:
        yield f"{agent.setting} and rollout.generate={generate} both say what plays the episodes; leave out one"
    yield from _program_folders(agent)
    if agent.sandbox == CONTAINER and agent.reward != "environment":
        yield (
            f"rollout.agent.reward={agent.reward} with rollout.agent.sandbox={CONTAINER}: the tests of the task give the reward; "
            "set rollout.agent.reward=environment"
        )
    if agent.reward == "session" and config.reward.setting is not None:
        yield f"rollout.agent.reward=session and {config.reward.setting} both say what the reward is; leave out one"


def _program_folders(program: ProgramConfig) -> Iterator[str]:
    key = program.key
    if program.files is not None and program.cwd is not None:
        yield (
            f"{key}.files={program.files} are copied into the folder of each episode, and {key}.cwd={program.cwd} is one for "
            "all; leave out one"
        )
    if program.sandbox is not None and program.cwd is not None:
        yield (
            f"{key}.cwd={program.cwd} with {key}.sandbox={program.sandbox}, which has its own folder; leave out one of them, or "
            f"set {key}.files"
        )


def _seat_programs(config: Config) -> Iterator[str]:
    for source in config.by_source().values():
        for program in source.env.programs.values():
            if program.setting is None:
                yield f"{program.key} is set, but no {program.key}.command or {program.key}.harness"
            if len(program.settings) > 1:
                yield f"{' and '.join(program.settings)} both say what plays; leave out one"
            if program.sandbox == CONTAINER:
                yield (
                    f"{program.key}.sandbox={CONTAINER}, but programs that play an agent have no machine of a task; set another "
                    "sandbox"
                )
            if source.rollout.loop is not None:
                yield f"{program.key} plays in an environment, and {source.rollout.loop} plays in its place; leave out one"
            if program.start == "episode" and program.answer != "message":
                yield (
                    f"{program.key}.answer={program.answer} with {program.key}.start=episode: the program posts its moves; leave "
                    "out one"
                )
            yield from _program_folders(program)


def _application_tasks(config: Config) -> Iterator[str]:
    """Rules of tasks that the agent brings: nothing else says which they are, or must know them before."""
    key, data_source = "rollout.agent.tasks=application", config.tasks.data_source
    for setting, value in (("data.path", config.data.path), ("tasks.name", config.tasks.name)):
        if value is not None:
            yield f"{setting}={value} and {key} both say where tasks are; set {setting}=null to train on the application's"
    if data_source != type(data_source)():
        yield (
            f"tasks.data_source.name={data_source.name} chooses among the tasks of the run, and with {key} the application does; "
            "leave it out"
        )
    if config.rollout.agent.reward == "environment":
        yield (
            f"rollout.agent.reward=environment with {key}: the environment begins before the application brings the task; set "
            "rollout.agent.reward=session or function"
        )


def _agent_address(config: Config) -> Iterator[str]:
    """Rules of agents elsewhere, for the run: its episodes have one port, in the run's own process."""
    agents = [source.rollout.agent for source in config.by_source().values() if source.rollout.agent.is_elsewhere]
    addresses = {f"rollout.agent.host={agent.host} rollout.agent.port={agent.port}": None for agent in agents}
    if len(addresses) > 1:
        yield f"the sources have {' and '.join(addresses)}; a run has one address for agents elsewhere: set it in rollout.agent"
    if agents and config.rollout.runners not in ("auto", 0):
        yield (
            f"rollout.runners={config.rollout.runners} with rollout.agent.port={agents[0].port}: episodes of agents elsewhere "
            "run in the run's own process; leave out rollout.runners"
        )


def _eval_sets(section: EvalConfig, sources: Collection[str]) -> Iterator[str]:
    sets = {"eval": section, **{f"eval.sets.{name}": eval_set for name, eval_set in section.sets.items()}}
    names = ", ".join(sources) or "none"
    for key, eval_set in sets.items():
        if eval_set.split is not None and eval_set.path is not None:
            yield f"{key}.split={eval_set.split} and {key}.path={eval_set.path}: a set has one source of tasks; leave one out"
        if eval_set.source is not None and eval_set.source not in sources:
            yield f"{key}.source={eval_set.source} is none of the run's sources ({names}); set it to one, or leave it out"
        is_default_section = key == "eval" and (eval_set.path is None or section.sets)
        if sources and not is_default_section and eval_set.source is None and section.source is None:
            yield f"{key}: a set of a run with several sources belongs to one of them; set {key}.source to one of {names}"


def _sft(config: Config) -> Iterator[str]:
    model, sft, data = config.model, config.sft, config.data
    if sft.steps is not None and sft.epochs is not None:
        yield f"sft.steps={sft.steps} and sft.epochs={sft.epochs:g} both say how long to train; leave out one of them"
    if sft.steps is None and data.path is None and sft.rollouts.path is None:
        yield f"sft.epochs={sft.epochs:g}: demonstrations have no epochs; set sft.steps, or data.path to a file of chats"
    if data.path is not None and sft.rollouts.path is not None:
        yield f"data.path={data.path} and sft.rollouts.path={sft.rollouts.path} both say what to train on; leave out one of them"
    choices = sft.rollouts.model_dump(exclude={"path"}, exclude_none=True)
    if choices and sft.rollouts.path is None:
        yield f"sft.rollouts.{next(iter(choices))} is set without sft.rollouts.path, the run whose rollouts it chooses"
    if sft.eval_share and data.eval_path is not None:
        yield f"sft.eval_share={sft.eval_share:g} and data.eval_path={data.eval_path} both say which chats to evaluate on"
    if model.warm_start_options and model.warm_start is None:
        yield "model.warm_start_options is set without model.warm_start, the configuration that it changes"
    steps = sum(stage.steps for stage in sft.curriculum)
    if sft.steps is not None and steps > sft.steps:
        yield f"sft.steps={sft.steps}, but the stages of sft.curriculum have {steps} steps"


def _epochs(config: Config) -> Iterator[str]:
    epochs, filters = config.train.epochs, config.rollout.filter_groups.filters
    if epochs is None:
        return
    key = f"train.epochs={epochs:g}"
    if config.sources:
        yield (
            f"{key} with sources ({', '.join(config.sources)}), whose weights say how often their tasks are taken: set "
            "train.steps, and leave out train.epochs"
        )
    if config.asynchronous.streaming and filters:
        yield (
            f"{key} with async.streaming=true and rollout.filter_groups.filters=[{', '.join(filters)}]: the tasks may end within "
            "a step whose gradient is computed in part; set train.steps, or leave out one of the others"
        )


def _whole_steps(config: Config) -> Iterator[str]:
    if not config.asynchronous.streaming:
        return
    functions = {"batch.convert": config.batch.convert}
    for source, source_config in config.by_source().items():
        prefix = f"sources.{source}." if source else ""
        functions[f"{prefix}algo.reward_post_process"] = source_config.algo.reward_post_process
    for key, reference in functions.items():
        if reference is not None:
            yield (
                f"{key}={reference} with async.streaming=true: it gets all rollouts of a training step, of which a part would be "
                "trained already; set async.streaming=false"
            )


def _algo(algo: AlgoConfig, sampler: SamplerConfig) -> Iterator[str]:
    correction = algo.correction
    if algo.old_logprobs == "sampler" and correction.rollout_is not in ("auto", "none"):
        yield (
            f"algo.correction.rollout_is={correction.rollout_is} with algo.old_logprobs=sampler: the loss's ratio is to the "
            "engine's probabilities already; set algo.old_logprobs=learner, or leave out algo.correction.rollout_is"
        )
    if correction.rollout_is_lower is not None and correction.rollout_is_lower >= correction.rollout_is_threshold:
        yield (
            f"algo.correction.rollout_is_lower={correction.rollout_is_lower:g} is not below "
            f"algo.correction.rollout_is_threshold={correction.rollout_is_threshold:g}"
        )
    if any(kind.endswith("k1") for kind in correction.rollout_rs) and correction.rollout_rs_threshold <= 1:
        yield (
            f"algo.correction.rollout_rs_threshold={correction.rollout_rs_threshold:g}: of k1 it is a ratio, and the lower limit "
            "its inverse; set it above 1"
        )
    if algo.routing_replay and sampler.has_router_program:
        yield (
            "algo.routing_replay=true with sampler.router=sglang: that router drops the option of requests that return experts; "
            "set sampler.router=builtin"
        )
    if algo.reference_steps and not algo.needs_reference:
        yield f"algo.reference_steps={algo.reference_steps} without a reference: set algo.kl_coef above 0, or leave it out"


def _distillation(config: Config) -> Iterator[str]:
    key, distillation = "algo.distillation", config.algo.distillation
    teachers = distillation.teachers
    if not teachers and (distillation.task_key is not None or not distillation.reward_coef):
        setting = (
            f"task_key={distillation.task_key}"
            if distillation.task_key is not None
            else f"reward_coef={distillation.reward_coef:g}"
        )
        yield f"{key}.{setting} without teachers: set {key}.teachers.NAME.url to a server, or leave it out"
    if distillation.default is not None and (distillation.task_key is None or distillation.default not in teachers):
        yield (
            f"{key}.default={distillation.default} must be one of {key}.teachers ({', '.join(teachers) or 'none'}), and is for "
            f"tasks that {key}.task_key assigns to none; set both, or leave it out"
        )
    for name, teacher in teachers.items():
        teacher_key = f"{key}.teachers.{name}"
        kinds = {"url": teacher.url, "path": teacher.path, "policy": teacher.policy}
        settings = [f"{kind}={value}" for kind, value in kinds.items() if value is not None]
        if len(settings) != 1:
            yield f"{teacher_key} has {' and '.join(settings) or 'none of url, path and policy'}; set exactly one of the three"
        if teacher.policy == "main" and teacher.context is None:
            yield f"{teacher_key}.policy=main without {teacher_key}.context: the policy would be its own teacher; set a context"
        if teacher.policy is None and config.sampler.temperature != 1:
            yield (
                f"{teacher_key}: servers score at temperature 1, and sampler.temperature={config.sampler.temperature:g}; set "
                "sampler.temperature=1"
            )
        if teacher.path is not None and config.placement.reserves_gpus:
            yield (
                f"{teacher_key}.path={teacher.path} with placement.mode={config.placement.mode}: a teacher's engine is not "
                f"placed; start a server and set {teacher_key}.url, or placement.mode=separate"
            )
        if teacher.context is not None:
            yield from _context(f"{teacher_key}.context", teacher.context)


def _context(key: str, text: str) -> Iterator[str]:
    if not is_context_template(text):
        if not is_reference(text):
            yield f"{key}={text!r:.200} has neither {{message}} nor {{answer}}, and is no module:function"
        return
    try:
        fields = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    except ValueError as error:
        yield f"{key}={text!r:.200} is no template: {error}; write {{{{ and }}}} for braces"
        return
    if unknown := sorted(fields - {"message", "answer"}):
        yield f"{key}={text!r:.200} has {{{unknown[0]}}}; a template has {{message}} and {{answer}}"


def is_context_template(text: str) -> bool:
    """Return whether a teacher's ``context`` is a text with places to fill in, and not a function's import path."""
    return "{" in text


def _batches(config: Config) -> Iterator[str]:
    """As in slime, ``rollout.batch_size`` x ``rollout.n_samples_per_prompt`` must equal ``batch.global_batch_size`` x
    ``train.steps_per_rollout``; and an optimizer step takes whole groups.
    """
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    batch_size, steps = config.batch.global_batch_size, config.train.steps_per_rollout
    if prompts % steps == 0 and batch_size in (None, prompts * samples // steps):
        return
    if prompts * samples == (batch_size or 0) * steps or batch_size is None:
        reason = f"an optimizer step takes whole groups, and {prompts} prompts cannot be divided into {steps} parts"
    else:
        reason = f"{prompts} x {samples} = {prompts * samples} rollouts a step, but {batch_size} x {steps} = {batch_size * steps}"
    fitting_batch_size = batch_size if batch_size is not None else f"{prompts * samples / steps:g}"
    yield (
        f"rollout.batch_size={prompts} x rollout.n_samples_per_prompt={samples} must be "
        f"batch.global_batch_size={fitting_batch_size} x train.steps_per_rollout={steps}: {reason}; "
        f"set for example {_fitting_batch_sizes(config)}"
    )


def _fitting_batch_sizes(config: Config) -> str:
    """Return batch sizes near the configured ones that fit together, as settings."""
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    batch_size, steps = config.batch.global_batch_size, config.train.steps_per_rollout
    if prompts % steps == 0:
        return f"batch.global_batch_size={prompts // steps * samples}"
    if batch_size is not None and batch_size % samples == 0:
        return f"rollout.batch_size={batch_size // samples * steps}"
    rounded_prompts = -(-prompts // steps) * steps
    return f"rollout.batch_size={rounded_prompts}" + (
        f" batch.global_batch_size={rounded_prompts // steps * samples}" if batch_size else ""
    )


def _self_play(config: Config) -> Iterator[str]:
    if config.self_play is None:
        return
    other_roles = [
        name
        for name, role in config.env.roles.items()
        if (role.policy is None and role.program is None) or role.frozen is not None or not role.train
    ]
    if other_roles:
        yield (
            f"self_play with env.roles ({', '.join(other_roles)}): self_play says who plays, env.roles only which policy and "
            "program a role has; leave out one"
        )
    if PAST in config.self_play.mix and config.placement.reserves_gpus:
        yield (
            f"self_play.mix has {PAST}, and placement.mode={config.placement.mode}: engines of snapshots are not placed; set "
            f"placement.mode=separate, or leave out {PAST}"
        )
    keep, staleness = config.self_play.pool.keep, config.asynchronous.max_staleness
    if config.self_play.snapshot_engines > keep + staleness:
        yield (
            f"self_play.engines={config.self_play.engines} with self_play.pool.keep={keep} and async.max_staleness={staleness}: "
            f"an engine plays one snapshot in a step, and there are {keep + staleness} at most; set self_play.engines to that"
        )
    if config.sources:
        yield f"self_play with sources ({', '.join(config.sources)}): a run with self-play has one environment; leave out one"
    agent = config.rollout.agent
    if config.rollout.loop is not None and not agent.agents:
        yield f"self_play with {config.rollout.loop}, whose episodes have one agent; leave out one"
    elif agent.setting is not None and agent.reward != "session":
        yield (
            f"self_play with {agent.setting} and rollout.agent.reward={agent.reward}: games are rated by the rewards of all "
            "agents, opponents included; set rollout.agent.reward=session"
        )


def _frozen_roles(config: Config) -> Iterator[str]:
    for source, source_config in config.by_source().items():
        for name, role in source_config.env.roles.items():
            if role.frozen is None:
                continue
            prefix = f"sources.{source}." if source else ""
            key = f"{prefix}env.roles.{name}.frozen={role.frozen}"
            if source:
                yield f"{key}: a run with frozen roles has one environment; leave it out, or leave out sources"
            if config.placement.reserves_gpus:
                yield (
                    f"{key} with placement.mode={config.placement.mode}: the engine of frozen weights is not placed; set "
                    "placement.mode=separate"
                )


def _judge_engines(config: Config) -> Iterator[str]:
    sampler = config.sampler
    for source, source_config in config.by_source().items():
        for name, term in source_config.reward.by_name.items():
            if term.judge is None or term.judge.model is None:
                continue
            section = f"reward.functions.{name}.judge" if source_config.reward.functions else "reward.judge"
            key = f"{f'sources.{source}.' if source else ''}{section}"
            if term.judge.gpus == "own" and not config.placement.reserves_gpus:
                yield (
                    f"{key}.gpus=own with placement.mode={config.placement.mode}: engines have the GPUs after the policy's "
                    "there; leave it out"
                )
            if term.judge.model != POLICY and term.judge.gpus == "shared" and config.placement.reserves_gpus:
                yield from _time_sharing(
                    config, f"{key}.model={term.judge.model} on the policy's GPUs", f"{key}.gpus=own"
                )
            if (
                not sampler.uses_sglang
                and sampler.url is None
                and term.judge.max_new_tokens >= sampler.embedded.context
            ):
                yield (
                    f"{key}.max_new_tokens={term.judge.max_new_tokens} leaves no place for a prompt in "
                    f"sampler.embedded.context={sampler.embedded.context}: lower the one, or raise the other"
                )
            if not sampler.uses_sglang and term.judge.sglang:
                yield f"{key}.sglang is set, and sampler.backend={sampler.backend} takes no options of SGLang; leave it out"


def _time_sharing(config: Config, key: str, own_gpus: str) -> Iterator[str]:
    """Why the policy's engines cannot release their memory for those of a judge between episodes and training.

    Args:
        config: of the run.
        key: of the judge, for messages.
        own_gpus: what gives it its own GPUs.
    """
    sampler, weights, staleness = config.sampler, config.weights, config.asynchronous.max_staleness
    mode = f"{key} with placement.mode={config.placement.mode}"
    if staleness:
        yield f"{mode} and async.max_staleness={staleness}: episodes run all the time; set {own_gpus}, or async.max_staleness=0"
    if config.eval.background:
        yield f"{mode} and eval.background=true: evaluations run all the time; set {own_gpus}, or leave out eval.background"
    if sampler.has_router_program:
        yield (
            f"{mode} and sampler.router=sglang: the router would send requests to engines without memory; set {own_gpus}, or "
            "leave out sampler.router"
        )
    if weights.adapters == "only":
        yield f"{mode} and weights.adapters=only: released memory may have adapters; set {own_gpus}, or weights.adapters=merged"
    if weights.prefix_cache != "drop":
        yield (
            f"{mode} and weights.prefix_cache={weights.prefix_cache}: engines release the memory of their cache; set {own_gpus}, "
            "or leave out weights.prefix_cache"
        )
    if sampler.speculative_algorithm not in (None, "NGRAM") and not sampler.sglang_option(
        "enable_draft_weights_cpu_backup", False
    ):
        yield (
            f"{mode} and sampler.sglang.speculative_algorithm: engines that release their memory lose the draft's weights; set "
            f"{own_gpus}, or sampler.sglang.enable_draft_weights_cpu_backup=true"
        )
    for name in ("enable_memory_saver", "enable_weights_cpu_backup"):
        if sampler.sglang_option(name, True) is False:
            yield f"{mode} and sampler.sglang.{name}=false: engines could not release and restore their weights; leave it out"


def _adapter_policies(config: Config) -> Iterator[str]:
    names = config.env.policies
    for source, source_config in config.by_source().items() if config.sources else ():
        if policies := ", ".join(source_config.env.policies):
            yield f"sources.{source}.env.roles names the policies {policies}: a mixed run trains one policy; leave them out"
    if not names:
        return
    if MAIN in names:
        yield f"env.roles names a policy {MAIN}, which is the policy of a run that names none; choose another name"
    key = f"env.roles names the policies {', '.join(names)}"
    if config.learner.lora is None:
        yield f"{key}, which are adapters over one base model: set learner.lora={{}}"
    elif config.weights.adapters != "only":
        yield f"{key}, and weights.adapters={config.weights.adapters}: merged weights are one policy; set weights.adapters=only"
    if config.rollout.loop is not None and not config.rollout.agent.agents:
        yield f"{key} with {config.rollout.loop}, which samples one policy; leave out one"
    if config.algo.distillation.teachers:
        yield f"{key} with algo.distillation.teachers: teachers are of one policy; leave out one"
