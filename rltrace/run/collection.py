"""Collects into the Recording what processes recorded on other hosts. It can be repeated, and never overwrites anything
else."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rltrace.host import regular_file
from rltrace.record.manifest import LINES, PROCESSES
from rltrace.run.nodes import Node, NodeError, Nodes, content, digest


@dataclass
class Collected:
    """What a collection fetched, and what it could not fetch."""

    files: int = 0
    size_bytes: int = 0
    hosts: set[str] = field(default_factory=set)
    """Hosts besides the Recording's own on which something was recorded."""
    failures: list[str] = field(default_factory=list)
    """One line per failure: a node that is gone, or a process whose folder holds another process here."""

    def __str__(self) -> str:
        if not self.hosts:
            return "no other host recorded anything"
        if not self.files:
            return f"nothing new on {', '.join(sorted(self.hosts))}"
        return f"{self.files:,} files, {self.size_bytes:,} bytes from {', '.join(sorted(self.hosts))}"


def collect(recording: Path, nodes: Nodes) -> Collected:
    """Fetch from every node what is new there; what a node has lost since is kept here.

    The Recording is valid at every moment: whole files replace their own earlier states, and nothing is deleted.
    """
    done = Collected()
    for node in nodes.alive():
        try:
            _collect_node(recording / PROCESSES, node, done)
        except NodeError as error:
            done.failures.append(f"{error}; {_MISSING}")
    for node in nodes.lost():
        done.failures.append(f"node {node.host}: gone; {_MISSING}")
    return done


_MISSING = "what it recorded since the last collection is missing here"


def _collect_node(folder: Path, node: Node, done: Collected) -> None:
    there: dict[str, str] = node.call("digests")
    processes: dict[str, list[str]] = {}
    for path in there:
        if _is_sound(path):
            processes.setdefault(PurePosixPath(path).parts[0], []).append(path)
    if processes:
        done.hosts.add(node.host)
    for key, paths in sorted(processes.items()):
        # A reader knows a process by its lines, and its spans by the types said in them: they come first, and once
        # more when the segments that may use newer types are here.
        lines = f"{key}/{LINES}"
        if lines not in there:
            continue
        if not _fetch_lines(folder, node, lines, done):
            done.failures.append(f"{folder / key}: holds a different process than on {node.host}; not overwritten")
            continue
        for path in paths:
            if path != lines and there[path] != _digest_here(folder / path):
                _write(folder / path, node.call("read", path), done)
        _fetch_lines(folder, node, lines, done)


def _fetch_lines(folder: Path, node: Node, path: str, done: Collected) -> bool:
    """Fetch the lines of a process unless they are here; return False if those here are not an earlier state of
    them."""
    data: bytes = node.call("read", path)
    try:
        here = regular_file.read(folder / path)
    except FileNotFoundError:
        here = None
    if here is not None and not data.startswith(here):
        return False
    if data != here:
        _write(folder / path, data, done)
    return True


def _digest_here(path: Path) -> str | None:
    try:
        return digest(content(path))
    except FileNotFoundError:
        return None


def _write(path: Path, data: bytes, done: Collected) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
    done.files += 1
    done.size_bytes += len(data)


def _is_sound(path: str) -> bool:
    """Return whether the path is one that a process writes, `<process>/<file>`, and does not lead out of the
    Recording."""
    parts = PurePosixPath(path).parts
    return len(parts) == 2 and not any(part.startswith(".") for part in parts)
