"""The documents of the repository: which there are, and the blocks, links and headings in one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "rltrace", "exporters", "reference_run", "examples", "tests")
"""That hold documents, besides the root."""

FENCE = re.compile(r"^ *(```+|~~~+)(?P<language>\S*)")
NO_RUN = re.compile(r"<!-- no-run: (?P<reason>.+) -->")
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`[^`]*`")
PATH = re.compile(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")


def documents() -> list[Path]:
    """Every Markdown file that is ours."""
    below = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.md"))
    return sorted([*ROOT.glob("*.md"), *below])


class Block(NamedTuple):
    """A fenced block."""

    line: int
    """Of its first line of text, from 1."""
    language: str
    text: str
    no_run: str | None
    """Why it does not run, as the comment above it says."""


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    found, lines, number = [], text.splitlines(), 0
    while number < len(lines):
        if fence := FENCE.match(lines[number]):
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == fence[1])
            above = NO_RUN.search(lines[number - 1]) if number else None
            inside = "\n".join(lines[number + 1 : end]) + "\n"
            found.append(Block(number + 2, fence["language"], inside, above["reason"] if above else None))
            number = end
        number += 1
    return found


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines outside of fenced blocks."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        if fence:
            fence = "" if line.strip() == fence else fence
        elif opened := FENCE.match(line):
            fence = opened[1]
        else:
            yield number, line


def links(text: str) -> Iterator[tuple[int, str]]:
    """Targets of links and pictures, each with its line; a link may go over two lines."""
    lines = dict(prose(text))
    written = "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))
    for link in LINK.finditer(CODE.sub(lambda code: re.sub(r"\S", "x", code[0]), written)):
        yield written.count("\n", 0, link.start()) + 1, link["target"]


def paths(text: str) -> Iterator[tuple[int, str]]:
    """Files and folders of the repository that the text names as code, or as a reason not to run, with their lines."""
    for number, line in prose(text):
        for code in (*CODE.findall(line), *NO_RUN.findall(line)):
            yield from ((number, path) for path in PATH.findall(code) if "*" not in code and "<" not in code)


def anchors(text: str) -> set[str]:
    """What a link to a heading of the document may name, as GitHub makes it."""
    found: dict[str, int] = {}
    for _, line in prose(text):
        if heading := re.match(r"#+ (.*)", line):
            words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()).strip()
            anchor = words.replace(" ", "-")
            found[anchor] = found.get(anchor, -1) + 1
    return {f"{anchor}-{n}" if n else anchor for anchor, last in found.items() for n in range(last + 1)}
