"""What supervised fine-tuning trains on: rows by step."""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.images import Image
from agentrl.core.types import Row
from agentrl.render.renderer import ChatRenderer


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of a chat or an episode, with the images that their tokens stand for."""

    rows: list[Row]
    """With at least one token to train on each."""
    images: Mapping[str, Image] = field(default_factory=dict)
    """By digest."""


def row_checksum(row: Row, checksum: int = 0) -> int:
    """Return the CRC-32 of the ids, the mask and the images of a row, continued from that of other rows."""
    digests = "".join(f"{span.start} {span.digest} " for span in row.images)
    return zlib.crc32(row.token_ids.tobytes() + row.mask.tobytes() + digests.encode(), checksum)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one optimizer step."""

    rows: list[Row]
    """Rows of all its episodes or chats."""
    metrics: dict[str, float]
    """Metrics of the data, such as ``sft/reward``, the mean reward of the episodes, the expert's mistakes included."""
    images: Mapping[str, Image] = field(default_factory=dict)
    """Images of the rows, by digest."""


@dataclass(slots=True)
class SftFile:
    """What there is to train on in a file or run, and what was found when it was read."""

    path: Path
    """The file, or the folder of the run."""
    key: str
    """The configuration key that names it."""
    numbers: NDArray[np.int64]
    """Numbers of what can be used."""
    tokens: int = 0
    """Tokens of all of it."""
    trained: int = 0
    """Tokens with mask 1."""
    checksum: int = 0
    """CRC-32 over all of it."""
    overlong: int = 0
    """How many have more than ``sft.max_tokens``."""
    longest: tuple[int, str] = field(default=(0, ""))
    """Tokens and place of the longest row."""

    unit: ClassVar[str]
    """What there is, in the plural."""

    @property
    @abstractmethod
    def left_out(self) -> list[str]:
        """What was left out and why, for `description`."""

    @property
    def description(self) -> str:
        """One line for the user."""
        parts = [f"{len(self.numbers):,} {self.unit}, {self.tokens:,} tokens, {self.trained:,} of them trained"]
        if self.overlong:
            parts.append(
                f"{self.overlong:,} left out by sft.max_tokens (the longest: {self.longest[1]}, {self.longest[0]:,} tokens)"
            )
        return f"{self.path}: {'; '.join([*parts, *self.left_out])}"

    def takes(self, location: str, longest: int, config: Config, context: int | None) -> bool:
        """Return whether something is short enough to be trained on, and count it if it is not.

        Args:
            location: its place, for messages.
            longest: tokens of its longest row.
            config: of the run.
            context: tokens that the model takes; None: not known.

        Raises:
            ConfigError: it is longer than the model's context.
        """
        limit = config.sft.max_tokens
        self.longest = max(self.longest, (longest, location), key=lambda row: row[0])
        if limit is not None and longest > limit:
            self.overlong += 1
            return False
        if context is not None and longest > context:
            raise ConfigError(
                f"{location} has {longest:,} tokens, and model.path={config.model.path} takes {context:,}: set "
                f"sft.max_tokens={context} to leave out longer {self.unit}"
            )
        return True


class SftData(ABC):
    """Item ``i`` holds the rows of some steps, in order. A pure function of the configuration and the data.

    Items are independent, so any process may make any of them; the object can be pickled.

    Args:
        make_renderer: builds the renderer, once in each process.
    """

    steps_per_item = 1
    """Steps of each item, the last one excepted."""

    def __init__(self, make_renderer: Callable[[], ChatRenderer]) -> None:
        self._make_renderer = make_renderer
        self._renderer: ChatRenderer | None = None

    @property
    def renderer(self) -> ChatRenderer:
        """The renderer, built on first access in each process."""
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the renderer, which each process builds."""
        return {**self.__dict__, "_renderer": None}

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def __getitem__(self, index: int) -> list[StepRows]:
        """Return the rows of the steps from ``index * steps_per_item`` on."""

    def close(self) -> None:  # noqa: B027  most data hold nothing open
        """Close what making items has opened in this process."""


class EpochData(SftData):
    """Item ``i`` holds the rows of step ``i``: each chat or rollout of a file is in one step before it is in a second one.

    Args:
        config: of the run.
        make_renderer: builds the renderer, once in each process.
        file: what there is.
        count: chats or rollouts in all steps together.
        shuffled: a new order in each epoch, by ``sft.seed``; else that of the file.
    """

    def __init__(
        self,
        config: Config,
        make_renderer: Callable[[], ChatRenderer],
        file: SftFile,
        count: int,
        *,
        shuffled: bool = True,
    ) -> None:
        super().__init__(make_renderer)
        self.file = file
        self._config = config
        self._count = count
        self._shuffled = shuffled
        self._order: tuple[int, NDArray[np.int64]] = (-1, file.numbers)

    @abstractmethod
    async def make_rows(self, number: int, epoch: int) -> ImageRows:
        """Return the rows of one of ``file.numbers``; their keys differ by epoch."""

    @override
    def __len__(self) -> int:
        return -(-self._count // self._config.sft.batch_size)

    @override
    def __getitem__(self, index: int) -> list[StepRows]:
        size = self._config.sft.batch_size
        end = min((index + 1) * size, self._count)
        rows: list[Row] = []
        images: dict[str, Image] = {}
        # Not the result: `asyncio.run` writes its repr, which takes as long as encoding.
        asyncio.run(self._add_rows(range(index * size, end), rows, images))
        return [StepRows(rows, {"sft/epoch": end / len(self.file.numbers)}, images)]

    async def _add_rows(self, positions: range, rows: list[Row], images: dict[str, Image]) -> None:
        for position in positions:
            epoch, place = divmod(position, len(self.file.numbers))
            encoded = await self.make_rows(int(self._numbers(epoch)[place]), epoch)
            rows += encoded.rows
            images |= encoded.images

    def _numbers(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers in the order of an epoch."""
        if self._shuffled and self._order[0] != epoch:
            generator = np.random.default_rng([self._config.sft.seed, epoch])
            self._order = (epoch, generator.permutation(self.file.numbers))
        return self._order[1]


F = TypeVar("F", bound=SftFile)


def split_off(file: F, share: float, seed: int) -> tuple[F, F]:
    """Return what to train on, and a share of the file, drawn with a seed, to evaluate on.

    Raises:
        ConfigError: one of the two would be empty.
    """
    count = round(share * len(file.numbers))
    if not 0 < count < len(file.numbers):
        raise ConfigError(
            f"sft.eval_share={share:g} of the {len(file.numbers)} {file.unit} of {file.key}={file.path} is {count}; it must "
            "leave some to train on and some to evaluate on"
        )
    order = np.random.default_rng(seed).permutation(len(file.numbers))
    evaluated, trained = np.sort(order[:count]), np.sort(order[count:])
    return replace(file, numbers=file.numbers[trained]), replace(file, numbers=file.numbers[evaluated])
