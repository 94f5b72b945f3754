"""All exceptions of agentrl.

::

    AgentrlError
    ├── UserError                  a mistake of the user; exit status 2
    │   ├── ConfigError            an unknown key, a value that does not fit
    │   │   └── NoLayoutError      a learner backend has no layout for a model and the keys that are set
    │   ├── UnknownNameError       no environment, tool, taskset or model of that name
    │   ├── ModelError             a model folder or hub id that cannot be loaded
    │   ├── MissingError           what this machine lacks: a file, a model, a package, a GPU; a dry run only lists it
    │   └── PortInUseError         a port that something else holds
    ├── EpisodeError               ends an episode; ``kind`` is its origin
    │   ├── SamplerError
    │   │   └── EngineLostError    an engine that cannot be reached; another may serve the request
    │   ├── EnvironmentFailure
    │   ├── AgentProgramError      the agent program (``rollout.agent``)
    │   ├── ToolFailure
    │   ├── SandboxFailure
    │   │   └── SandboxKilledError a sandbox that was killed as it started; another may start
    │   ├── JudgeError             a judge or a reward model gave no score
    │   ├── TaskError
    │   └── ConversationError      messages that the chat format refuses, or would not show to the policy
    ├── ServiceError               a service that others run gave no usable reply
    │   └── ServiceRefusedError    it refused the request, and would refuse it again
    ├── EngineError                an engine that does not start, or died
    ├── ToolServerError            a tool server that does not start, or died
    ├── TrialError                 a trial of `agentrl tune` that failed
    ├── CallbackError              a callback of the run raised, or returned what it may not
    ├── RunnerError                a runner process that does not start, fails, or died too often
    ├── LearnerError               a learner that failed
    │   ├── ProvenanceError        a batch that would train on tokens that no engine sampled
    │   └── UngradedError          rollouts that would be trained without a reward
    ├── DataError                  rows of data that cannot be read while a run needs them
    ├── AuditError                 saved rollouts that are not as they were sampled
    ├── DiagnosisError             problems that `agentrl doctor` found in a run
    ├── CheckpointError            a checkpoint that is not whole
    │   └── OtherKeysError         a checkpoint that was written with other keys; a `UserError` too
    ├── TemplateError              a chat template that no conversation can be trained with
    └── RunStopped                 the failure policy or Ctrl-C ended the run, which has been saved

All can be pickled: Ray sends them between processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

from agentrl.core.types import Failure, FailureKind


class AgentrlError(Exception):
    """Root of the tree."""


class UserError(AgentrlError):
    """A mistake that the user can correct; the message names the value and the key to change."""


class ConfigError(UserError):
    """A configuration that cannot be used."""


class NoLayoutError(ConfigError):
    """A learner backend has no layout for a model and the keys that are set."""


class UnknownNameError(UserError):
    """Nothing is registered under a name; see `unknown_name`."""


class ModelError(UserError):
    """A model that cannot be loaded."""


class MissingError(UserError):
    """A model, data, a package or a GPU that the run needs is missing on this machine.

    ``--dry-run`` lists it and continues; a run is refused.
    """


class PortInUseError(UserError):
    """Something else listens on the port."""


class EpisodeError(AgentrlError):
    """Ends one episode. The run's failure policy decides by ``kind`` what follows."""

    kind: ClassVar[FailureKind] = FailureKind.ENVIRONMENT

    def as_failure(self) -> Failure:
        """Return this error as data."""
        return Failure(self.kind, type(self).__name__, str(self))


class SamplerError(EpisodeError):
    """A generation failed: the engine refused it, or could not be reached."""

    kind = FailureKind.SAMPLER


class EngineLostError(SamplerError):
    """A generation failed because its engine cannot be reached; another one may still serve it."""


class EnvironmentFailure(EpisodeError):
    """The environment's own code raised."""

    kind = FailureKind.ENVIRONMENT


class AgentProgramError(EpisodeError):
    """The agent program failed, did not end, or sent no request."""

    kind = FailureKind.AGENT


class ToolFailure(EpisodeError):
    """A tool's infrastructure failed."""

    kind = FailureKind.TOOL


class SandboxFailure(EpisodeError):
    """A sandbox's infrastructure failed."""

    kind = FailureKind.SANDBOX


class SandboxKilledError(SandboxFailure):
    """A sandbox that was killed as it started: another may start."""


class JudgeError(EpisodeError):
    """A judge or a reward model gave no score. The sample has no reward, and is dropped."""

    kind = FailureKind.REWARD


class TaskError(EpisodeError):
    """A task that cannot be used."""

    kind = FailureKind.TASK


class ConversationError(EpisodeError):
    """A conversation that the chat format refuses, or from which it would leave something out."""

    kind = FailureKind.TASK


class ServiceError(AgentrlError):
    """A service that others run gave no usable reply after all attempts; the message has its address and the key to change."""


class ServiceRefusedError(ServiceError):
    """A service refused a request, and would refuse it again: a wrong key, model or value.

    Args:
        message: has the address and the key to change.
        status: of the reply, if it is an error.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        """Return the message."""
        return str(self.args[0])


class EngineError(AgentrlError):
    """An engine does not start, died, or refuses a control request."""


class ToolServerError(AgentrlError):
    """A tool server does not start, or died."""


class TrialError(AgentrlError):
    """A trial of ``agentrl tune`` failed or took too long."""


class CallbackError(AgentrlError):
    """A callback of the run raised, or returned what it may not; the message names the callback and the hook."""


class RunnerError(AgentrlError):
    """A runner process that does not start, fails, or died too often."""


class LearnerError(AgentrlError):
    """A learner rank failed."""


class ProvenanceError(LearnerError):
    """A batch would train on a token that no engine sampled."""


class UngradedError(LearnerError):
    """A rollout would be trained whose reward is not final or not finite, or with an advantage that is not finite."""


class DataError(AgentrlError):
    """Rows of data cannot be read while a run needs them: a worker process died, or a hub does not answer."""


class AuditError(AgentrlError):
    """Saved rollouts are not as the policy sampled them."""


class DiagnosisError(AgentrlError):
    """A run has a problem that `agentrl doctor` found."""


class CheckpointError(AgentrlError):
    """A checkpoint is missing something or was written by another set-up."""


class OtherKeysError(CheckpointError, UserError):
    """A whole checkpoint was written with other configuration keys; an older one of its run would not fit either."""


class TemplateError(AgentrlError):
    """A chat template cannot be used at all. Only its check raises this; a run refuses what it needs."""


class RunStopped(AgentrlError):
    """The run was ended early on purpose; its state is saved."""


def unknown_name(kind: str, name: str, registered: Iterable[str], key: str) -> UnknownNameError:
    """Return the error for an unknown ``name``: what it is, the nearest known one, and the key to change.

    Example: ``unknown_name("environment", "serch_r1", ["search_r1"], "--env")``.
    """
    names = sorted(registered)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UnknownNameError(f"unknown {kind} {name!r} ({key}).{hint} Known: {', '.join(names) or 'none'}.")
