"""Folders of runs for tests of pages and for their pictures."""

import dataclasses
import json
import math
import random
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from PIL import Image as pil

from agentrl.config.layers import save_config
from agentrl.config.load import validate
from agentrl.core.images import ImageSpan, load_image
from agentrl.core.types import (
    Failure,
    FailureKind,
    FinishReason,
    MaskReason,
    Provenance,
    Rollout,
    Row,
    RowKey,
    StopReason,
    Turn,
)
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.self_play.games import Game, WinTable
from agentrl.self_play.ratings import Ratings
from benchmarks.viewer import synthetic_entries

EVIL = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'><!-- <b>bold</b>"
SAMPLED = Provenance.SAMPLED


PICTURE = load_image(pil.new("RGB", (20, 10), "red"))
"""Of rollout ``3/1``, in place of its second token."""


def rollout(tokenizer, step, number, words, **changes):
    """Prompt, then by turns sampled and observed text; groups of 4, the last token of each is stale."""
    first = changes.get("prompt", f"Question {number // 4}\n")
    parts = [tokenizer.encode(text, add_special_tokens=False).ids for text in (first, *words)]
    who = np.concatenate([np.full(len(piece), k % 2, np.uint8) for k, piece in enumerate(parts)])
    sampled = who == SAMPLED
    why = np.where(sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8)
    why[-1] = MaskReason.STALE if sampled[-1] and len(parts[-1]) > 1 else why[-1]
    identity = f"{step}/{number}"
    row = Row(
        key=RowKey(f"task-{step}-{number // 4}", identity),
        token_ids=np.array([token for piece in parts for token in piece], np.int32),
        provenance=who,
        mask=(why == MaskReason.NONE).astype(np.uint8),
        mask_reason=why,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, step - 1, -1).astype(np.int32),
        requests=np.where(sampled, 0, -1).astype(np.int32),
        request_ids=(f"{identity}/first",),
    )
    fields = {
        "rows": [row],
        "reward": float(number % 2),
        "stop_reason": StopReason.TERMINATED,
        "turns": [Turn(words[0], "", FinishReason.STOP, float(number % 2))],
        "prompt": f"Question {number // 4}\n",
        "metrics": {"exact_match": float(number % 2)},
        "sampled_tokens": int(sampled.sum()),
    }
    return Rollout(row.key.prompt_id, identity, **(fields | changes))


def record(folder, tokenizer):
    """Steps 1 to 3 of 8 rollouts in 2 groups; the last step has a hostile one, a snowman, and a failure."""
    recorder = RolloutRecorder(folder / "rollouts")
    for step in (1, 2, 3):
        rollouts = [rollout(tokenizer, step, n, ["<think> yes", "seen", f"say {n % 2}"]) for n in range(8)]
        rollouts[7].rows.append(dataclasses.replace(rollouts[6].rows[0], key=RowKey("", "", "critic", 1)))
        if step == 3:
            rollouts[0] = rollout(
                tokenizer, 3, 0, [EVIL], label=EVIL, metadata={EVIL: EVIL}, stop_reason=StopReason.MAX_TURNS
            )
            rollouts[1] = rollout(tokenizer, 3, 1, ["a snow☃man 🙂 here"])
            rollouts[1].images = {PICTURE.digest: PICTURE}
            row = rollouts[1].rows[0]
            rollouts[1].rows[0] = dataclasses.replace(row, images=(ImageSpan(1, 1, PICTURE.digest),))
            gone = Failure(FailureKind.TOOL, "ToolFailure", f"search is gone {EVIL}")
            rollouts[2] = rollout(
                tokenizer, 3, 2, ["x"], rows=[], failure=gone, stop_reason=StopReason.FAILED, dropped=True
            )
        recorder.write(step, rollouts)
        recorder.finish(
            step,
            {
                scored_rollout.rollout_id: scored_rollout.reward - 0.5
                for scored_rollout in rollouts
                if scored_rollout.failure is None
            },
        )
    rows = [{"step": step, "train/reward": step / 4, "train/entropy": 0.1} for step in (1, 2, 3)]
    rows.insert(0, {"step": 0, "eval/reward": 0.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(json.dumps({"model": {"path": "multihop-warm"}, "env": {"name": "search_r1"}}))


def add_metrics(folder: Path, step: int, **metrics: float) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


def step_metrics(step: int, seed: int, **changed: float) -> dict[str, float]:
    """Metrics of a step of a run that learns."""
    noise = random.Random(seed * 1000 + step)
    phases = {"rollout": 2.4, "train": 1.5, "sync": 0.3, "pack": 0.1, "score": 0.4, "other": 0.1}
    seconds = {name: value * (0.8 + 0.4 * noise.random()) for name, value in phases.items()}
    causes = {"learner": 0.28, "weight_sync": 0.05, "tools": 0.06, "long_tail": 0.11, "other": 0.02}
    idle = {name: value * (0.7 + 0.6 * noise.random()) for name, value in causes.items()}
    return {
        "train/reward": 1 - 0.8 * math.exp(-step / (12 + 6 * seed)) + noise.gauss(0, 0.03),
        "train/entropy": 0.9 * math.exp(-step / 60) + 0.1 + noise.gauss(0, 0.01),
        "train/grad_norm": 0.4 + 0.2 * noise.random(),
        "train/sampler_kl": 1e-4,
        "train/flat_groups": 0.2,
        "rollout/episodes": 64.0,
        "rollout/dropped": 0.0,
        "rollout/turns": 3 + noise.random(),
        "rollout/stop/terminated": 0.95,
        "rollout/engine_restarts": 0.0,
        "rollout/cache_hit": 0.83,
        "time/step_s": sum(seconds.values()),
        "time/tokens_per_s": 9000 + 900 * noise.random(),
        "learner_idle/total": 0.55,
        "slot_idle/tools": 0.08,
        "slot_idle/long_tail": 0.12,
        "host_memory/trainer_gib": 2.1,
        "host_memory/engine_gib": 3.4,
        "engine_idle/total": sum(idle.values()),
        **{f"time/{name}_s": value for name, value in seconds.items()},
        **{f"engine_idle/{name}": value for name, value in idle.items()},
        **changed,
    }


def write_config(folder: Path, seed: int = 0, **sections: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "env": {"name": "search_r1"},
        "model": {"path": "multihop-warm"},
        "train": {"steps": 80},
        "run": {"seed": seed},
    }
    save_config(validate(config | sections), folder)


def write_metrics(folder: Path, steps: int, seed: int = 0, **changed: float) -> None:
    for step in range(1, steps + 1):
        add_metrics(folder, step, **step_metrics(step, seed, **changed))
        if step % 10 == 0:
            add_metrics(
                folder, step, **{"eval/reward": 1 - 0.8 * math.exp(-step / (12 + 6 * seed)), "time/eval_s": 2.0}
            )


def write_rollouts(folder: Path, rollouts: Iterable[tuple[int, Rollout, float]]) -> None:
    """Write rollouts of steps, in the order of their steps, with their advantages."""
    recorder = RolloutRecorder(folder / "rollouts")
    for step, group in groupby(rollouts, key=lambda line: line[0]):
        lines = list(group)
        recorder.write(step, [rollout for _, rollout, _ in lines])
        recorder.finish(step, {rollout.rollout_id: advantage for _, rollout, advantage in lines})


def write_synthetic_rollouts(folder: Path, count: int, tokens: int, seed: int = 0) -> None:
    """Write many rollouts of words that no tokenizer has."""
    entries = synthetic_entries(count, tokens, seed)
    write_rollouts(folder, ((entry.step, entry.rollout, entry.advantage or 0.0) for entry in entries))


def write_league(folder: Path, steps: int) -> None:
    ratings, results, chance = Ratings(), WinTable(), random.Random(3)
    with (folder / "league.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            games = []
            for number in range(8):
                opponent = chance.choice(
                    ["random", "first_mover", *(f"step_{5 * n:06d}" for n in range(1, 1 + step // 5))]
                )
                wins = chance.random() < min(0.9, 0.4 + step / 60)
                players = ("policy", opponent) if number % 2 else (opponent, "policy")
                rewards = (1.0, -1.0) if wins == (players[0] == "policy") else (-1.0, 1.0)
                games.append(Game(f"{step}/{number}", players, rewards))
            ratings.update(games, {"policy": 0.3})
            results.add(games)
            file.write(orjson.dumps({"step": step, "ratings": ratings.state(), "results": results.state()}) + b"\n")
