"""The training loop: roll out, learn, send weights, measure, save."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.algo import group_advantages
from agentrl.batch.groups import RolloutGroups
from agentrl.batch.packing import pack
from agentrl.cluster.learners import start_learners
from agentrl.config.schema import Config
from agentrl.episode.recorder import RolloutRecorder
from agentrl.episode.runner import Job
from agentrl.errors import AgentrlError, CheckpointError, RunStopped
from agentrl.eval import evaluate
from agentrl.evaluation import mean, rollout_means
from agentrl.interrupt import Interrupt
from agentrl.learner.checkpoints import Checkpoints
from agentrl.models.resolve import resolve_model
from agentrl.obs.curve import plot_curve
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.progress import ProgressView, Stopwatch
from agentrl.obs.show import rollout_panel
from agentrl.preflight import open_tasks
from agentrl.protocols import LearnerGroup, WeightSync
from agentrl.runfolder import choose_folder, prepare_folder
from agentrl.stack import Stack, open_stack
from agentrl.task import TaskSet
from agentrl.tasksource import TaskOrder, episode_seed
from agentrl.types import Rollout
from agentrl.weights import make_sync
