"""A task of the suite trained by TRL's GRPOTrainer: the same tasks in the same order, warm start, batch and number of steps."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console

from agentrl.config.schema import Config
from agentrl.core.env import Env
from agentrl.core.errors import ConfigError, MissingError
from agentrl.core.extras import is_installed
from agentrl.core.registry import make_env, reward_function
from agentrl.core.task import Task
from agentrl.core.types import FinishReason, Message, Rollout, StopReason, Turn
from agentrl.data.task_sources import make_order, open_tasks, read_splits
from agentrl.evaluation.sets import load_eval_tasks
from agentrl.learner.device import resolve_device
from agentrl.obs.console import print_message
from agentrl.render.registry import load_renderer
from agentrl.rewards.sample import Sample
from agentrl.train.warm_start import initial_policy
from benchmarks.learning_suite import TRL, Result


class SingleTurns:
    """Prompts and rewards of an environment of one turn.

    Args:
        config: of a run.

    Raises:
        ConfigError: the environment offers tools.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._score = None if config.reward.function is None else reward_function(config.reward.function)
        if self._env().tools:
            raise ConfigError(f"env.name={config.env.name} offers tools: --trainer trl plays tasks of one turn alone")

    def _env(self) -> Env:
        return make_env(self._config.env.name, self._config.env.options)

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """Return the messages that the policy reads."""
        observation, _ = self._env().reset(seed=0, options={"task": task})
        assert isinstance(observation, tuple), "the first observation has messages"
        return observation

    def reward(self, task: Task, text: str) -> float:
        """Return the reward of a turn.

        Raises:
            ConfigError: the episode goes on after it.
        """
        env = self._env()
        env.reset(seed=0, options={"task": task})
        _, reward, terminated, _, _ = env.step(Message("assistant", text))
        if not terminated:
            raise ConfigError(f"task {task.id!r} takes more than one turn, which --trainer trl does not play")
        if self._score is None:
            return float(reward)
        rollout = Rollout(
            task.id,
            "trl",
            [],
            0.0,
            StopReason.TERMINATED,
            turns=[Turn(text, "", FinishReason.STOP)],
            metadata=dict(task.metadata),
            label=task.answer,
        )
        score = self._score(Sample.from_rollout(rollout))
        return float(score[self._config.reward.key or "score"] if isinstance(score, dict) else score)


def train_with_trl(task: str, policy: str, config: Config, console: Console) -> Result:
    """Train a task of the suite with TRL; the warm start is that of a run of agentrl in the same folder, or is made now.

    Raises:
        MissingError: TRL is not installed.
        ConfigError: the task takes several turns, or tools, or the run has no number of steps.
        AgentrlError: the warm start failed.
    """
    if not is_installed("trl"):
        raise MissingError("--trainer trl needs the package trl: pip install 'trl>=1.16'")
    folder = config.run.dir
    assert folder is not None, "the suite sets it"
    begun = time.monotonic()
    config, model, warm = initial_policy(config, folder, None, console)
    if warm is not None:
        asyncio.run(warm.train(console))
    turns = SingleTurns(config)
    sources = open_tasks(config)
    if config.train.steps is None:
        raise ConfigError("train.steps=null: --trainer trl needs the number of steps")
    count = config.train.steps * config.rollout.batch_size
    tasks = make_order(config, read_splits(config, sources)).get_samples(count)
    eval_tasks = load_eval_tasks(config, sources)[0].tasks
    trainer = make_trainer(config, model, turns, tasks, folder / "trl", console)
    check_prompts(config, model, trainer.processing_class, turns, tasks[0])
    initial = evaluate(config, trainer, turns, eval_tasks)
    print_message(console, f"TRL, evaluation after step 0: reward {initial:.3f}")
    training = time.monotonic()
    trainer.train()
    training_s = time.monotonic() - training
    final = evaluate(config, trainer, turns, eval_tasks)
    print_message(console, f"TRL, evaluation after step {trainer.state.global_step}: reward {final:.3f}")
    return Result(
        task,
        policy,
        TRL,
        config.run.seed,
        initial,
        final,
        (time.monotonic() - begun) / 60,
        training_s / 60,
        trainer.state.global_step,
    )


def make_trainer(
    config: Config, model: Path, turns: SingleTurns, tasks: Sequence[Task], out: Path, console: Console
) -> Any:
    """Return TRL's trainer with the settings of a run: GRPO without a KL term, and the loss averaged over tokens.

    The metrics of its steps are printed, and written to ``out/metrics.jsonl``.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from pyarrow import Table
    from transformers import PrinterCallback, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    class StepLines(TrainerCallback):
        """Prints and writes the metrics of each step."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs is None or "reward" not in logs:
                return
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
            text = f"TRL, step {state.global_step}/{state.max_steps}  reward {logs['reward']:.3f}"
            print_message(console, f"{text}  step s {logs['step_time']:.1f}")

    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").unlink(missing_ok=True)

    rollout, optimizer = config.rollout, config.learner.optimizer
    on_gpu = resolve_device(config.learner) == "cuda"
    episodes = rollout.batch_size * rollout.n_samples_per_prompt
    settings = GRPOConfig(
        output_dir=str(out),
        seed=config.run.seed,
        max_steps=len(tasks) // rollout.batch_size,
        per_device_train_batch_size=episodes,
        num_generations=rollout.n_samples_per_prompt,
        shuffle_dataset=False,
        max_completion_length=config.sampler.max_new_tokens,
        temperature=config.sampler.temperature,
        learning_rate=optimizer.fixed_lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optimizer.fixed_warmup_steps,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )

    def score(completions: Sequence[Sequence[dict[str, str]]], number: Sequence[int], **_: object) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [turns.reward(tasks[index], text) for index, text in zip(number, texts, strict=True)]

    rows = [{"prompt": to_chat(turns.prompt(task)), "number": index} for index, task in enumerate(tasks)]
    reward: Any = score
    # A fingerprint is for the cache of other data sets. It is computed by pickling, which fails with some versions of pyarrow.
    dataset = Dataset(InMemoryTable(Table.from_pylist(rows)), fingerprint=f"agentrl-{config.run.seed}")
    trainer = GRPOTrainer(str(model), reward, settings, dataset, callbacks=[StepLines()])
    trainer.remove_callback(PrinterCallback)
    return trainer


def to_chat(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages as Transformers takes them."""
    return [{"role": message.role, "content": message.content} for message in messages]


def check_prompts(config: Config, model: Path, tokenizer: Any, turns: SingleTurns, task: Task) -> None:
    """Check that both trainers write a prompt with the same tokens.

    Raises:
        ConfigError: they differ.
    """
    messages = turns.prompt(task)
    ours = list(load_renderer(model, config.render).render(messages).token_ids)
    theirs = tokenizer.apply_chat_template(
        to_chat(messages), add_generation_prompt=True, tokenize=True, return_dict=True
    )
    if ours != [*theirs["input_ids"]]:
        raise ConfigError(
            f"render.format={config.render.format} writes other prompts than the chat template of {model}"
        )


def evaluate(config: Config, trainer: Any, turns: SingleTurns, tasks: Sequence[Task]) -> float:
    """Return the mean reward of one sampled answer to each task, at the temperature of the evaluation."""
    tokenizer, model = trainer.processing_class, trainer.model
    torch.manual_seed(config.run.seed)
    rewards: list[float] = []
    for indices in np.array_split(np.arange(len(tasks)), max(1, len(tasks) // 128)):
        chats = [to_chat(turns.prompt(tasks[int(index)])) for index in indices]
        prompts = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", padding=True
        ).to(model.device)
        with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            tokens = model.generate(
                **prompts,
                do_sample=True,
                temperature=config.eval.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=config.sampler.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        texts = tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards += [turns.reward(tasks[int(index)], text) for index, text in zip(indices, texts, strict=True)]
    return fmean(rewards)
