"""Rollouts as parquet: one line per rollout; tokens, masks, log-probabilities and provenance are list columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.atomic_files import write_atomically
from agentrl.core.errors import ConfigError
from agentrl.core.extras import require
from agentrl.core.reading import reading
from agentrl.core.types import Rollout
from agentrl.obs.rollout_format import ARRAYS, rollout_to_dict

AS_JSON = ("label", "metadata", "tool_uses")
"""Columns of arbitrary structure, stored as JSON text."""
SMALL = ("agent_id", "row", "request_ids", "turns", "fork", "temperature", "crc32")
"""Fields of a row besides its arrays."""
ENDPOINT = ("endpoint", "messages", "tools")
"""Columns that only rollouts of a model at an endpoint have, stored as JSON text."""
AS_OPTIONAL_JSON = (*ENDPOINT, "images")
"""Columns that only some rollouts have, stored as JSON text."""
OPTIONAL = ("player", "filtered", *AS_OPTIONAL_JSON)
"""Columns that only some rollouts have: those of multi-agent episodes, of filtered groups, of models at endpoints, and with
images."""
ROW_GROUP = 512
"""Rollouts per parquet row group."""


def write_parquet(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write rollouts to ``path`` atomically."""
    require("pyarrow", "obs.rollout_format=parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(
        [_to_line(rollout, number) for number, rollout in enumerate(rollouts)], schema=_schema()
    )
    with write_atomically(path) as partial:
        pq.write_table(table, partial, compression="zstd", row_group_size=ROW_GROUP, write_page_checksum=True)


def iter_parquet(path: Path, first_group: int = 0) -> Iterator[dict[str, Any]]:
    """Iterate over the rollouts of a file in the format of `rollout_to_dict`, with one row group in memory at a time.

    Args:
        path: the file.
        first_group: the first row group that is read.

    Raises:
        ConfigError: the file cannot be read, is damaged, or has no rollouts.
    """
    require("pyarrow", str(path))
    import pyarrow.parquet as pq

    with reading(path, "parquet file"), pq.ParquetFile(path, page_checksum_verification=True) as file:
        required = (name for name in _schema().names if name not in OPTIONAL)
        missing_columns = [name for name in required if name not in file.schema_arrow.names]
        if missing_columns:
            raise ConfigError(f"{path} holds no rollouts: it lacks the column(s) {', '.join(missing_columns)}")
        for group in range(first_group, file.num_row_groups):
            table = file.read_row_group(group)
            lines = table.drop_columns(["rows"]).to_pylist()
            yield from map(_from_line, lines, _read_rows(table["rows"]))


def parquet_headers(path: Path) -> Iterator[tuple[dict[str, object], int]]:
    """Iterate over the rollouts of a file without their rows, in the format of `rollout_to_dict`, and their tokens.

    Raises:
        ConfigError: the file cannot be read, or is damaged.
    """
    require("pyarrow", str(path))
    import pyarrow.parquet as pq

    with reading(path, "parquet file"), pq.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if name != "rows"]
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=[*names, "rows.list.element.token_ids"])
            lines = table.drop_columns(["rows"]).to_pylist()
            yield from zip((_from_line(line, []) for line in lines), _count_tokens(table["rows"]), strict=True)


def _count_tokens(column: Any) -> list[int]:
    """Return the tokens of each rollout."""
    tokens = []
    for chunk in column.chunks:
        ends = chunk.values.field("token_ids").offsets.to_numpy()
        bounds = chunk.offsets.to_pylist()
        tokens += [int(ends[stop] - ends[start]) for start, stop in pairwise(bounds)]
    return tokens


def read_parquet_rollout(path: Path, number: int) -> dict[str, object]:
    """Return a rollout of a file by its number, in the format of `rollout_to_dict`.

    Raises:
        ConfigError: the file cannot be read, is damaged, or has no such rollout.
    """
    lines = islice(iter_parquet(path, first_group=number // ROW_GROUP), number % ROW_GROUP, None)
    if (line := next(lines, None)) is None:
        raise ConfigError(f"{path} has no rollout {number}")
    return line


def _schema() -> Any:
    import pyarrow as pa

    text, number = pa.string(), pa.float64()
    turn = pa.struct([("action", text), ("observation", text), ("finish_reason", text), ("reward", number)])
    spans = pa.list_(pa.list_(text))
    arrays = [(name, pa.list_(pa.from_numpy_dtype(kind))) for name, kind in ARRAYS.items()]
    row = pa.struct(
        [
            ("agent_id", text),
            ("row", pa.int32()),
            ("request_ids", pa.list_(text)),
            ("turns", pa.list_(pa.int64())),
            ("fork", text),
            ("temperature", number),
            ("crc32", pa.int64()),
            ("support", text),
            ("images", spans),
            *arrays,
        ]
    )
    names = [(name, text) for name in ("agent", "role", "policy", "opponent", "episode")]
    words = [(name, text) for name in ("agent", "role", "player")]
    lists = [("steps", pa.list_(pa.int32())), ("moves", pa.list_(text))]
    seats = pa.list_(pa.struct([*words, ("trained", pa.bool_()), *lists]))
    player = pa.struct([*names, ("seat", pa.int64()), ("seat_rewards", pa.list_(number)), ("seats", seats)])
    return pa.schema(
        [
            ("prompt_id", text),
            ("rollout_id", text),
            ("reward", number),
            ("stop_reason", text),
            ("metrics", pa.map_(text, number)),
            ("prompt", text),
            ("label", text),
            ("turns", pa.list_(turn)),
            ("failure", pa.struct([("kind", text), ("error", text), ("message", text)])),
            ("dropped", pa.bool_()),
            ("filtered", text),
            ("seconds", number),
            ("tool_seconds", number),
            ("tool_uses", text),
            ("sampled_tokens", pa.int64()),
            ("metadata", text),
            *((name, text) for name in AS_OPTIONAL_JSON),
            ("player", player),
            ("number", pa.int64()),
            ("checksum", pa.int64()),
            ("rows", pa.list_(row)),
        ]
    )


def _to_line(rollout: Rollout, number: int) -> dict[str, Any]:
    line = rollout_to_dict(rollout, number)
    line["metrics"] = list(line["metrics"].items())
    present = [*AS_JSON, *(name for name in AS_OPTIONAL_JSON if name in line)]
    return line | {name: json.dumps(line[name]) for name in present}


def _from_line(line: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    present = [*AS_JSON, *(name for name in AS_OPTIONAL_JSON if line.get(name) is not None)]
    line = line | {name: json.loads(line[name]) for name in present}
    return line | {"metrics": dict(line["metrics"]), "rows": rows}


def _read_rows(column: Any) -> list[list[dict[str, Any]]]:
    """Return the rows of each rollout with NumPy arrays: converting them to Python numbers would take minutes."""
    rows_by_rollout = []
    for chunk in column.chunks:
        structs = chunk.values
        names = {field.name for field in structs.type}
        small = {name: structs.field(name).to_pylist() for name in (*SMALL, *names & {"support", "images"})}
        arrays = {name: _split(structs.field(name)) for name in ARRAYS}
        rows = [{name: values[i] for name, values in (small | arrays).items()} for i in range(len(structs))]
        bounds = chunk.offsets.to_pylist()
        rows_by_rollout += [rows[start:stop] for start, stop in pairwise(bounds)]
    return rows_by_rollout


def _split(lists: Any) -> list[NDArray[np.generic]]:
    """Return the arrays of a list column."""
    bounds = lists.offsets.to_numpy()
    values = lists.values.to_numpy(zero_copy_only=False)
    return [values[start:stop].copy() for start, stop in pairwise(bounds)]
