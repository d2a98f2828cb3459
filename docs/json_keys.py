"""Writes `docs/json.md` from the fields of the figures: `python docs/json_keys.py`, or `make docs`."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rltrace.analysis.checks import Checked
from rltrace.analysis.difference import Difference
from rltrace.analysis.findings import Why
from rltrace.analysis.listing import ListedRun
from rltrace.analysis.moments import Boundary
from rltrace.analysis.plan.plan import Plan
from rltrace.analysis.summary import Summary

PAGE = Path(__file__).with_name("json.md")
HEAD = """\
<!-- Written by docs/json_keys.py from the docstrings in rltrace/analysis/: change them, then run `make docs`. -->

# Keys of the JSON

`rltrace summary --json` prints one [Summary](#summary), `rltrace why --json` one [Why](#why), `rltrace diff --json` one
[Difference](#difference), `rltrace check --json` one [Checked](#checked), `rltrace plan --json` one [Plan](#plan), and
`rltrace ls --json` a list of [ListedRun](#listedrun).

```sh
rltrace summary --json > summary.json
python -c 'import json; print(json.load(open("summary.json"))["steady"]["seconds"])'
```

Times are in seconds and sizes in bytes, as the keys say; `start_seconds` and the like count from the beginning of the
Recording. `null` is a figure that this Recording does not have. To compare runs take `steady`, which leaves the first
step out.

`version` is raised when a key goes or changes its meaning. New keys do not raise it, so ignore keys that you do not
know.

In Python the same value is `rltrace.analysis.summarize(rltrace.Recording.open(run))`, of which
`rltrace.analysis.encoded.as_json` makes this JSON.
"""
ROOTS = (Summary, Why, Difference, Checked, Plan, ListedRun)
JSON_TYPES = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
    "None": "null",
    "Any": "any value",
}

COLUMNS = {"Boundaries": Boundary}
"""Types that JSON has as lists, with what they are made of."""

Struct = type[msgspec.Struct]


def page() -> str:
    """The whole page."""
    sections = {struct: paths for root in ROOTS for struct, paths in found(root).items()}
    for struct, paths in found(Summary).items():
        sections[struct] = list(dict.fromkeys(paths + sections[struct]))
    return HEAD + "".join(section(struct, paths) for struct, paths in sections.items())


def found(root: Struct) -> dict[Struct, list[str]]:
    """Every Struct that a value holds, with the keys at which it is."""
    paths: dict[Struct, list[str]] = {}
    pending = [(root, "")]
    while pending:
        struct, path = pending.pop(0)
        paths.setdefault(struct, []).append(path)
        pending += [(inner, f"{path}.{key}".strip(".")) for inner, key in inner_structs(struct)]
    return paths


def inner_structs(struct: Struct) -> Iterator[tuple[Struct, str]]:
    """The Structs that fields of one hold, each with its key: `memory[]`, `stages.*`."""
    for name, annotation in annotations(struct).items():
        for known in structs_of(struct):
            if re.search(rf"\b{known}\b", annotation):
                suffix = "[]" if annotation.startswith("list") else ".*" if annotation.startswith("dict") else ""
                yield structs_of(struct)[known], name + suffix


def section(struct: Struct, paths: list[str]) -> str:
    """Heading, where it is, what it is, and a row per field."""
    places = ", ".join(f"`{path}`" for path in paths if path)
    rows = [
        f"| `{name}` | {type_words(struct, annotation)} | {prose(struct, docs(struct)[name])} |"
        for name, annotation in annotations(struct).items()
    ]
    where = [f"At {places}.", ""] if places else []
    about = prose(struct, inspect.cleandoc(struct.__doc__ or ""))
    table = ["| key | type | meaning |", "|---|---|---|", *rows]
    return "\n".join(["", f"## {struct.__name__}", "", *where, about, "", *table, ""])


@functools.cache
def annotations(struct: Struct) -> dict[str, str]:
    """Each field's type as the source has it, inherited fields first; columns are a list of what they are made of."""
    return {
        name: f"list[{COLUMNS[annotation].__name__}]" if annotation in COLUMNS else annotation
        for base in _bases(struct)
        for name, (annotation, _) in _fields(base).items()
    }


@functools.cache
def docs(struct: Struct) -> dict[str, str]:
    """Each field's docstring."""
    return {name: doc for base in _bases(struct) for name, (_, doc) in _fields(base).items()}


def _bases(struct: Struct) -> list[Struct]:
    return [
        base for base in reversed(struct.__mro__) if issubclass(base, msgspec.Struct) and base is not msgspec.Struct
    ]


@functools.cache
def _fields(struct: Struct) -> dict[str, tuple[str, str]]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(node, ast.ClassDef)
    fields = {}
    for field, behind in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            fields[ast.unparse(field.target)] = (ast.unparse(field.annotation), _docstring(struct, field, behind))
    return fields


def _docstring(struct: Struct, field: ast.AnnAssign, behind: ast.stmt | None) -> str:
    if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant) and isinstance(behind.value.value, str):
        return inspect.cleandoc(behind.value.value)
    raise ValueError(
        f"{struct.__module__}.{struct.__name__}.{ast.unparse(field.target)}: no docstring behind the field"
    )


@functools.cache
def structs_of(struct: Struct) -> dict[str, Struct]:
    """The Structs that a Struct's module knows, by name."""
    known = {}
    for base in _bases(struct):
        for name, value in vars(sys.modules[base.__module__]).items():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct:
                known[name] = value
            elif name in COLUMNS:
                known[COLUMNS[name].__name__] = COLUMNS[name]
    return known


def type_words(struct: Struct, annotation: str) -> str:
    """A type in JSON's words: `dict[str, int | None]` is a map of integer or null."""
    if " | " in annotation and not annotation.startswith(("list[", "dict[", "tuple[")):
        return " or ".join(type_words(struct, part) for part in annotation.split(" | "))
    outer, _, inner = annotation.removesuffix("]").partition("[")
    if outer == "list":
        return f"list of {type_words(struct, inner)}"
    if outer == "dict":
        return f"map of {type_words(struct, inner.partition(', ')[2])}"
    if outer == "tuple":
        return f"list of {' and '.join(type_words(struct, part) for part in inner.split(', '))}"
    if annotation in structs_of(struct):
        return f"[{annotation}](#{annotation.lower()})"
    return JSON_TYPES.get(annotation, "string")  # else an alias of `Literal`: one of several words


def prose(struct: Struct, text: str) -> str:
    """A docstring as a cell: Structs are links, Python's None is JSON's null."""
    linked = re.sub(r"`([A-Z]\w+)`", lambda name: _link(struct, name), " ".join(text.split()))
    return re.sub(r"\bNone\b", "`null`", linked).replace("|", "\\|")


def _link(struct: Struct, name: re.Match[str]) -> str:
    known = {found_struct.__name__ for root in ROOTS for found_struct in found(root)}
    return f"[{name[1]}](#{name[1].lower()})" if name[1] in known else name[0]


if __name__ == "__main__":
    PAGE.write_text(page())
