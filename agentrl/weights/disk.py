"""Weights sent through a folder that learner and engines both see."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from agentrl.protocols import EngineControl, LearnerGroup
from agentrl.weights.engines import Check, on_all


class DiskSync:
    """Writes a safetensors file a bucket and their index, has the engines read them, and deletes them.

    Args:
        bucket_bytes: size of a file; a larger tensor makes one of its own.
        folder: parent of what is written; memory-backed where speed matters.
        check: what engines are asked afterwards; see `Check`.

    """

    def __init__(self, *, bucket_bytes: int, folder: Path, check: str = "version") -> None:
        self.folder = folder
        self.bucket_bytes = bucket_bytes
        self.check = check

    async def aclose(self) -> None:
        """Nothing is kept between updates."""

    async def push(self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int) -> None:
        """Write the weights and have them loaded; see `WeightSync.push`.

        Raises:
            EngineError: an engine could not load them, or the check afterwards fails.

        """
        folder = self.folder / f"version_{version:06d}"
        check = Check(self.check)

        async def load(engine: EngineControl) -> None:
            await engine.update_from_disk(folder, version)

        try:
            await asyncio.to_thread(self._write, learner, check, folder)
            await on_all(engines, f"weights of version {version} from {folder}", load)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder)
        await check.of(engines, version)

    def _write(self, learner: LearnerGroup, check: Check, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        places: dict[str, str] = {}
        size = 0
        for number, bucket in enumerate(check.watch(learner.weights(self.bucket_bytes))):
            file = f"model-{number:05d}.safetensors"
            save_file({name: tensor.cpu().contiguous() for name, tensor in bucket}, folder / file, {"format": "pt"})
            places |= {name: file for name, _ in bucket}
            size += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
