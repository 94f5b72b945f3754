"""The options of the search tool: ``tools.search.options`` in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import ConfigError

from .calls import MAX_TOPK
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
    """A JSONL file, or files by corpus name; without it, the taskset's own corpora."""

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
        if self.corpus is None:
            return {}
        return dict(self.corpus) if isinstance(self.corpus, dict) else {DEFAULT: self.corpus}
