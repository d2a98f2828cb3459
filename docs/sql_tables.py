"""Writes the tables of `docs/sql.md` from their descriptions: `python docs/sql_tables.py`, or `make docs`."""

from __future__ import annotations

from pathlib import Path

import json_keys

from rltrace.frames.schema import TABLES, Column, Table

PAGE = Path(__file__).with_name("sql.md")
MARK = "<!-- Written by docs/sql_tables.py from rltrace/frames/schema.py: change that, then run `make docs`. -->\n"

TYPES = {"text": "VARCHAR", "integer": "BIGINT", "decimal": "DOUBLE", "boolean": "BOOLEAN", "json": "VARCHAR (JSON)"}
UNITS = {
    "_ns": "ns",
    "gigabytes_per_second": "10⁹ bytes per second",
    "tokens_per_second": "tokens per second",
    "seconds": "seconds",
    "bytes": "bytes",
    "share": "share, 0 to 1",
    "kv_usage": "share, 0 to 1",
    "tokens": "tokens",
    "columns": "tokens",
    "rows": "sequences",
    "tensors": "tensors",
    "buckets": "buckets",
    "spans": "spans",
    "samples": "samples",
    "ranks": "ranks",
    "running": "requests",
    "waiting": "requests",
    "preempted": "requests",
    "fired": "calls",
    "reward_mean": "the program's own",
    "value": "at the end of `name`",
}
"""The unit of a number, by the end of its name; the first that fits."""
NUMBERS = {"rank", "span", "step", "thread", "task", "thread_lane", "moment", "boundary", "pid"}
"""Columns of numbers that tell things apart, and count or measure nothing."""


def page() -> str:
    """The whole page: the head as it is, and the tables."""
    head = PAGE.read_text().partition(MARK)[0]
    return head + MARK + "".join(map(section, TABLES.values()))


def section(table: Table) -> str:
    """One table."""
    rows = [
        f"| `{column.name}` | {TYPES[column.kind]} | {unit(column)} | {meaning(column)} |" for column in table.columns
    ]
    head = ["", f"### {table.name}", "", table.about, "", "| column | type | unit | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def unit(column: Column) -> str:
    """The unit of a column of numbers; nothing for any other."""
    if column.kind not in ("integer", "decimal") or column.name in NUMBERS:
        return ""
    return next(unit for end, unit in UNITS.items() if column.name.endswith(end))


def meaning(column: Column) -> str:
    """What a column means; that of a field of the JSON is its docstring."""
    said = column.meaning
    if column.field is not None:
        struct, field = column.field
        said = json_keys.prose(struct, json_keys.docs(struct)[field]).replace("](#", "](json.md#")
    return said.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
