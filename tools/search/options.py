"""The options of the search tool: ``tools.search.options`` in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.core.errors import ConfigError

from .calls import MAX_TOPK
from .corpora import E5_MODEL, RetrieverName
from .corpus import DEFAULT


class SearchOptions(BaseModel):
    """What may be set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] = 3
    """Documents a search, where the environment does not say."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds one request may take."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Further tries after a request that failed."""
    corpus: Path | dict[str, Path] | None = None
    """A JSONL file (gzipped or not), or files by corpus name; without it, the taskset's own corpora."""
    retriever: RetrieverName = "bm25"
    """``bm25`` by words, ``e5`` by meaning (wants ``agentrl[e5]``)."""
    model: str = E5_MODEL
    """E5's model: a folder or a hub id."""
    index: Path | dict[str, Path] | None = None
    """E5's FAISS index, or one by corpus name: loaded where the file exists, else built and saved there."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where E5 runs, and its index where that is a flat one."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> SearchOptions:
        """Check options.

        Raises:
            ConfigError: an unknown option or a value that does not fit, by key.

        """
        try:
            return cls(**options)
        except ValidationError as error:
            faults = [
                f"tools.search.options.{'.'.join(map(str, fault['loc']))}={fault['input']!r}: {fault['msg']}"
                for fault in error.errors()
            ]
            known = ", ".join(cls.model_fields)
            raise ConfigError("; ".join(faults) + f" (options: {known})") from None

    def files(self) -> dict[str, Path]:
        """Return the corpus files by name; empty where none is set."""
        return _by_name(self.corpus)

    def indexes(self) -> dict[str, Path]:
        """Return the index files by name; empty where none is set."""
        return _by_name(self.index)


def _by_name(files: Path | dict[str, Path] | None) -> dict[str, Path]:
    if files is None:
        return {}
    return {name: path.expanduser() for name, path in (files if isinstance(files, dict) else {DEFAULT: files}).items()}
