"""Loops without agentrl that take the optimizer steps of ``agentrl bench learner``, for comparison."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from agentrl.core.errors import ConfigError
from agentrl.core.types import Row


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """What a loop uses."""

    liger: bool = False
    """Liger's kernels, its fused head and loss among them."""
    compiled: bool = False
    """Compile each decoder layer."""
    trl: bool = False
    """The step of TRL's SFTTrainer."""
    dtype: torch.dtype = torch.float32
    """Of weights, gradients and moments."""


LOOPS = {
    "hf": LoopOptions(),
    "liger": LoopOptions(liger=True),
    "compiled": LoopOptions(compiled=True),
    "trl": LoopOptions(liger=True, trl=True),
    "bfloat16": LoopOptions(compiled=True, dtype=torch.bfloat16),
}
"""By name. All have autocast to bfloat16, full recomputation, fused AdamW and sorted, padded rows; but for ``bfloat16`` all
have float32 weights."""


def check_loop(name: str) -> None:
    """Check that a loop exists and that its packages are installed.

    Raises:
        ConfigError: with what is missing.
    """
    if name not in LOOPS:
        raise ConfigError(f"--loops={name}: there are {', '.join(LOOPS)}")
    packages = {"trl": LOOPS[name].trl, "datasets": LOOPS[name].trl, "liger_kernel": LOOPS[name].liger}
    if missing := [package for package, needed in packages.items() if needed and find_spec(package) is None]:
        raise ConfigError(f"--loops={name} needs {' and '.join(missing)}, not installed here; leave it out of --loops")


class OtherLoop:
    """A loop on a Hugging Face model. Its loss is a cross-entropy, which computes what a policy loss does.

    Args:
        options: what it uses.
        folder: of the model.
        rows: of each step.
        tokens: maximum padded tokens of a micro-batch.
        device: where it computes.
    """

    def __init__(
        self, options: LoopOptions, folder: Path, rows: Sequence[Row], tokens: int, device: torch.device
    ) -> None:
        self._device = device
        self._model = _load(options, folder).to(device)
        self._model.train()
        self._model.gradient_checkpointing_enable({"use_reentrant": False})
        if options.compiled:
            for layer in self._model.model.layers:
                layer.forward = torch.compile(layer.forward)
        self._liger = options.liger
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        self._batches = [_pad(group, device) for group in _sorted_groups(rows, tokens)]
        self._count = sum(int((labels != -100).sum()) for _, labels in self._batches)
        self._trl = _TrlStep(self._model, self._optimizer) if options.trl else None

    def step(self) -> dict[str, float]:
        """Take an optimizer step and return its memory, as the learner's metric."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if self._trl is not None:
            self._trl.step(self._batches, self._count)
        else:
            self._plain_step()
        if self._device.type != "cuda":
            return {}
        torch.cuda.synchronize()
        return {"train/peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30}

    def _plain_step(self) -> None:
        for ids, labels in self._batches:
            with torch.autocast(self._device.type, torch.bfloat16):
                if self._liger:
                    loss = self._model(ids, labels=labels, num_items_in_batch=self._count, use_cache=False).loss
                else:
                    hidden = self._model.base_model(ids, use_cache=False).last_hidden_state[:, :-1]
                    trained = labels[:, 1:] != -100  # logits of all tokens would not fit
                    logits = self._model.lm_head(hidden[trained]).float()
                    loss = F.cross_entropy(logits, labels[:, 1:][trained], reduction="sum") / self._count
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


class _TrlStep:
    """TRL's `SFTTrainer.training_step` on each micro-batch, then its clipping and optimizer."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        datasets: Any = import_module("datasets")
        trl: Any = import_module("trl")
        arguments = trl.SFTConfig(
            output_dir="unused",
            bf16=model.device.type == "cuda",
            use_cpu=model.device.type == "cpu",
            use_liger_kernel=model.device.type == "cuda",
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            report_to=[],
            save_strategy="no",
            max_length=None,  # rows stay as they are
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
        )
        rows = datasets.table.InMemoryTable.from_pydict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
        # With a fingerprint it is not pickled to make one, which fails with some releases of pyarrow and dill.
        dataset = datasets.Dataset(rows, fingerprint="rows")
        self._trainer = trl.SFTTrainer(
            model, args=arguments, train_dataset=dataset, processing_class=_tokenizer(), optimizers=(optimizer, None)
        )
        self._trainer.model_accepts_loss_kwargs = True
        # As `train()` does before its first step; it is what computes in bfloat16.
        self._trainer.model = self._trainer.accelerator.prepare_model(self._trainer.model)
        self._optimizer = optimizer

    def step(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int) -> None:
        """Take an optimizer step."""
        trainer = self._trainer
        for ids, labels in batches:
            inputs = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
            trainer.training_step(trainer.model, inputs, num_items_in_batch=count)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _tokenizer() -> Any:
    """Return a tokenizer for TRL, which asks for one; the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return make(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")


def _load(options: LoopOptions, folder: Path) -> Any:
    if options.liger:
        # It warns of each kernel for other devices that it cannot import.
        log = logging.getLogger("liger_kernel.backends.registry")
        log.addFilter(lambda record: "could not be imported" not in record.getMessage())
        kernels: Any = import_module("liger_kernel.transformers")
        return kernels.AutoLigerKernelForCausalLM.from_pretrained(
            str(folder), dtype=options.dtype, trust_remote_code=False
        )
    from transformers import AutoModelForCausalLM as Model

    return Model.from_pretrained(str(folder), dtype=options.dtype, trust_remote_code=False)


def _sorted_groups(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Yield rows of similar lengths, at most ``tokens`` padded ones."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: -len(row.token_ids)):
        if group and len(group[0].token_ids) * (len(group) + 1) > tokens:
            yield group
            group = []
        group.append(row)
    yield group


def _pad(rows: Sequence[Row], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, padded at the end, where a causal model needs no mask."""
    longest = max(len(row.token_ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), -100)
    for number, row in enumerate(rows):
        tokens = torch.from_numpy(row.token_ids).long()
        ids[number, : len(tokens)] = tokens
        labels[number, : len(tokens)] = torch.where(torch.from_numpy(row.mask) != 0, tokens, -100)
    return ids.to(device), labels.to(device)
