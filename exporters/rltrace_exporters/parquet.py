"""Writes the tables of a Recording as Parquet: a folder with a file for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from rltrace.frames.arrow import Streamed
from rltrace.frames.schema import TABLES
from rltrace.frames.tables import Tables
from rltrace.read.recording import Recording

ROWS = 1 << 20
"""Rows of a row group: so many are held at a time."""


class Parquet:
    """The format for what reads columns: DuckDB, pandas, polars, Spark."""

    suffix = ".parquet"

    def write_folder(self, recording: Recording, folder: Path) -> None:
        """Write every table into a folder; one without rows too, so that its columns are there."""
        tables = Tables(recording)
        for name, table in TABLES.items():
            _write(tables.dataset(table), folder / f"{name}{self.suffix}")


def _write(dataset: Streamed, file: Path) -> None:
    schema = pa.schema([(field.name, _plain(field.type)) for field in dataset.schema])
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as out:
        for group in _groups(dataset.scanner().to_reader()):
            out.write_table(group.cast(schema))


def _plain(kind: Any) -> Any:
    """Return the type of the values: Parquet has dictionaries of its own."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _groups(batches: Iterable[Any]) -> Iterator[Any]:
    held: list[Any] = []
    for batch in batches:
        held.append(batch)
        if sum(one.num_rows for one in held) >= ROWS:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)
