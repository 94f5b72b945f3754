"""The suite of small learning tasks: names, settings of its runs, results, and the bands of these."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.config.load import read_yaml

TASKS: Mapping[str, str] = {
    "reverse_text": "words backwards, letter by letter",
    "alphabet_sort": "names to keep in order, in two turns",
    "alphabet_sort_single": "the same in one turn, for trainers without several",
    "guess_number": "a number with six hints, GuessTheNumber of TextArena",
    "calculator": "calculations with the calculator of an MCP server",
    "reasoning_gym": "chain_sum of reasoning-gym",
    "wordle": "Wordle of TextArena",
}
"""The tasks, each the preset ``learning/TASK``."""
SINGLE_TURN = ("reverse_text", "alphabet_sort_single", "reasoning_gym")
"""Those that TRL plays: one turn, no tools."""
POLICIES = ("small", "smollm2")
"""``small``: 0.8M parameters on a CPU. ``smollm2``: SmolLM2-135M-Instruct on a GPU, by the layer ``learning/smollm2``."""
AGENTRL, TRL = TRAINERS = ("agentrl", "trl")
RESULTS = "results.jsonl"
_BANDS = Path(__file__).with_name("learning_bands.yaml")
_CALCULATOR = "agentrl_tools.calculator.mcp_service:CalculatorServer"


@dataclass(frozen=True, slots=True)
class Band:
    """The scores after training that were measured, widened by the noise of an evaluation. Example: ``Band(0.93, 0.99)``."""

    low: float
    high: float

    def place(self, score: float) -> str:
        """Return where a score lies: ``inside``, ``below`` or ``above``."""
        if score < self.low:
            return "below"
        return "above" if score > self.high else "inside"


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run of the suite. Example: ``Result("reverse_text", "small", "agentrl", 0, 0.61, 0.95, 2.9, 1.4, 40)``."""

    task: str
    policy: str
    trainer: str
    seed: int
    initial: float
    """Mean reward of the evaluation tasks at temperature 1, after the warm start."""
    final: float
    """The same after training."""
    minutes: float
    """Of everything: start, warm start, training and evaluations."""
    training_minutes: float
    """Of the training steps alone."""
    steps: int

    def place(self, bands: Mapping[str, Band]) -> str:
        """Return where the score after training lies in the task's band; ``no band`` if there is none."""
        band = bands.get(band_key(self.task, self.policy, self.trainer))
        return "no band" if band is None else f"{band.place(self.final)} {band.low:.2f} to {band.high:.2f}"


def band_key(task: str, policy: str, trainer: str) -> str:
    """Return the key of a band."""
    return f"{task}/{policy}/{trainer}"


def read_bands(path: Path = _BANDS) -> dict[str, Band]:
    """Return the bands by `band_key`, from a file ``{task: {policy: {trainer: [low, high]}}}``."""
    return {
        band_key(task, policy, trainer): Band(*bounds)
        for task, policies in read_yaml(path).items()
        for policy, trainers in policies.items()
        for trainer, bounds in trainers.items()
    }


def preset_names(task: str, policy: str) -> list[str]:
    """Return the shipped configurations of a task, from bottom to top."""
    return [f"learning/{task}", *(["learning/smollm2"] if policy == "smollm2" else [])]


def run_name(task: str, policy: str, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{task}-{policy}-{seed}"


def run_settings(task: str, policy: str, out: Path, seed: int) -> dict[str, Any]:
    """Return the settings of a run that its presets do not have."""
    settings: dict[str, Any] = {"run": {"dir": str(out / run_name(task, policy, seed)), "seed": seed}}
    if policy == "small":
        settings["model"] = {"path": str(out / "init")}
    if task == "calculator":
        # The command of an MCP server gets no other variables of this process.
        server = {_CALCULATOR: {"options": {"env": {"PYTHONPATH": ":".join(filter(None, sys.path))}}}}
        settings["tools"] = server
        settings.setdefault("model", {})["warm_start_options"] = {"tools": server}
    return settings


def make_small_policy(out: Path) -> None:
    """Write the untrained small policy into ``out/init``, if it is not there."""
    from agentrl_tasks.learning.make_policy import save_policy

    if not (out / "init" / "config.json").is_file():
        save_policy(out / "init")


def append_result(out: Path, result: Result) -> None:
    """Add a result to ``out/results.jsonl``."""
    with (out / RESULTS).open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
