"""Data sources, buffer filters and evaluation functions of users, tried on the tasks and the rollouts of a recorded step."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentrl.config.schema import Config
from agentrl.core.data_source import DataSource
from agentrl.core.errors import ConfigError, UserError
from agentrl.core.policy_evaluation import PolicyEvaluation
from agentrl.core.task import Task
from agentrl.core.types import Message, Rollout
from agentrl.core.user_code import is_finite
from agentrl.data.buffer import DataBuffer, get_tasks, load_buffer_filter
from agentrl.data.order import TaskOrder
from agentrl.data.task_sources import Split, errors_name_source, make_data_source, open_tasks, read_splits
from agentrl.evaluation.metrics import compute_metrics, flat
from agentrl.evaluation.own_function import KEY as EVALUATION_KEY
from agentrl.evaluation.own_function import call_evaluation, load_evaluation
from agentrl.train.function_report import FunctionReport, RecordedStep

SOURCE_KEY, FILTER_KEY = "tasks.data_source.name", "rollout.buffer_filter"
_STEPS = 3
"""Training steps for which a data source is tried."""


def check_data_source(config: Config, source: str, step: RecordedStep) -> FunctionReport:
    """Take the tasks of some steps with recorded rewards as results, and continue from the state as a resumed run does.

    Args:
        config: of the source, as of a run with one environment.
        source: its name in a mixed run; else empty.
        step: whose rewards are given.
    """
    section = config.tasks.data_source
    report = FunctionReport(f"sources.{source}.{SOURCE_KEY}" if source else SOURCE_KEY, section.name)
    count = config.rollout.batch_size
    rewards = [[rollout.reward for rollout in group if not rollout.dropped] for group in step.groups]
    try:
        with errors_name_source(source):
            split = read_splits(config, open_tasks(config))[""]
            order, same_order = (make_data_source(section, split, config.run.seed) for _ in range(2))
            tasks: list[Task] = []
            for number in range(_STEPS):
                begun = time.perf_counter()
                batch = get_tasks(order, count)
                report.seconds.append(time.perf_counter() - begun)
                if [task.id for task in get_tasks(same_order, count)] != [task.id for task in batch]:
                    report.faults.append(
                        f"two data sources with run.seed={config.run.seed} return other tasks in step {number + 1}: the choice "
                        "must be a function of tasks, seed, options and results"
                    )
                    break
                tasks += batch
                results = {task.id: rewards[index % len(rewards)] for index, task in enumerate(batch) if rewards}
                for data_source in (order, same_order):
                    data_source.on_trained({task: values for task, values in results.items() if values})
            report.faults += _resume_faults(config, split, order, count)
    except UserError as error:
        report.faults.append(str(error))
        return report
    report.lines += [
        f"{len({task.id for task in tasks})} different tasks among the {len(tasks)} of {_STEPS} steps",
        report.time(f"for {count} tasks"),
    ]
    return report


def _resume_faults(config: Config, split: Split, order: DataSource, count: int) -> list[str]:
    """Return what a resumed run would have otherwise, and metrics that are no numbers."""
    key = f"tasks.data_source: {type(order).__name__}"
    state = order.state()
    try:
        text = json.dumps(state)
    except (TypeError, ValueError) as error:
        return [f"{key}.state() returned what JSON cannot hold: {error}"]
    resumed = make_data_source(config.tasks.data_source, split, config.run.seed)
    buffer = DataBuffer(resumed)
    buffer.load_state({"next": 0, "drawn": 0, "taken": {}, "buffer": [], "again": [], "source": json.loads(text)})
    expected, actual = ([task.id for task in get_tasks(data_source, count)] for data_source in (order, resumed))
    faults = []
    if expected != actual:
        index = next(number for number, pair in enumerate(zip(expected, actual, strict=True)) if len({*pair}) > 1)
        faults.append(
            f"after load_state(state()) task {index + 1} is {actual[index]!r} and not {expected[index]!r}: a resumed run "
            "would get other tasks; keep all that the choice depends on in the state"
        )
    for name, value in resumed.metrics().items():
        if not isinstance(value, int | float) or not is_finite(value):
            faults.append(f"{key}.metrics() has {name}={value!r:.50}, which is no finite number")
    return faults


def check_buffer_filter(config: Config, step: RecordedStep) -> FunctionReport:
    """Let the filter choose among the tasks of the recorded step, as if they had been given back, until none is left."""
    report = FunctionReport(FILTER_KEY, str(config.rollout.buffer_filter))
    tasks = _recorded_tasks(step)
    new_task = Task("new", ())
    taken: list[str] = []
    try:
        buffer = DataBuffer(
            TaskOrder([new_task], 0), load_buffer_filter(config.rollout), f"{FILTER_KEY}={config.rollout.buffer_filter}"
        )
        buffer.add_samples(tasks)
        for position in range(len(tasks)):
            begun = time.perf_counter()
            taken.append(buffer[position].id)
            report.seconds.append(time.perf_counter() - begun)
    except ConfigError as error:
        report.faults.append(str(error))
        return report
    refused = taken.count(new_task.id)
    order = [task.id for task in tasks]
    report.lines += [
        f"takes {len(tasks) - refused} of {len(tasks)} tasks, {'the oldest first' if taken == order else 'in another order'}",
        report.time("a task"),
    ]
    if refused == len(tasks):
        report.faults.append("it takes no task: tasks that were given back would never be played again")
    return report


def _recorded_tasks(step: RecordedStep) -> list[Task]:
    """Return the tasks of a step as far as rollouts record them: with the whole prompt as one message."""
    return [
        Task(group[0].prompt_id, (Message("user", group[0].prompt),), group[0].label, group[0].metadata)
        for group in step.groups
    ]


@dataclass
class RecordedPolicy(PolicyEvaluation):
    """The policy of recorded rollouts: whatever is to be played, they are returned."""

    recorded: RecordedStep
    played: int = 0
    """Episodes that were to be played."""
    ran_sets: bool = False

    @override
    async def run_sets(self) -> Mapping[str, float]:
        if self.ran_sets:
            raise ConfigError(f"{EVALUATION_KEY}: run_sets was called before")
        self.ran_sets = True
        return self.set_metrics()

    def set_metrics(self) -> dict[str, float]:
        """Return the metrics of the recorded rollouts, as if they were those of the sets, once those were run."""
        return flat(compute_metrics(self.recorded.rollouts), "eval/") if self.ran_sets else {}

    @override
    async def rollouts(
        self, tasks: Sequence[Task], *, n_samples: int = 1, **sampling: float | None
    ) -> Sequence[Rollout]:
        groups = {group[0].prompt_id: group for group in self.recorded.groups}
        others = [*groups.values()]
        self.played += len(tasks) * n_samples
        return [
            group[sample % len(group)]
            for number, task in enumerate(tasks)
            for group in [groups.get(task.id, others[number % len(others)])]
            for sample in range(n_samples)
        ]


async def check_evaluation(config: Config, step: RecordedStep) -> FunctionReport:
    """Let the function evaluate the policy that has played the recorded rollouts."""
    report = FunctionReport(EVALUATION_KEY, str(config.eval.function))
    tree = config.model_dump(mode="json", by_alias=True)
    policy = RecordedPolicy(step.step, tree, {"eval": _recorded_tasks(step)}, step)
    try:
        function = load_evaluation(config.eval)
        assert function is not None, "it has a name"
        begun = time.perf_counter()
        metrics = await call_evaluation(function, str(config.eval.function), policy, policy.set_metrics)
        report.seconds.append(time.perf_counter() - begun)
    except ConfigError as error:
        report.faults.append(str(error))
        return report
    episodes = f"{policy.played} episodes" + (" and the sets" if policy.ran_sets else "")
    report.lines += [
        f"plays {episodes}, and returns "
        + (", ".join(f"{name}={value:g}" for name, value in metrics.items()) or "nothing"),
        report.time("an evaluation, without its episodes"),
    ]
    if not policy.played and not policy.ran_sets:
        report.faults.append("it plays no episode: call policy.run_sets() or policy.rollouts(tasks)")
    return report
