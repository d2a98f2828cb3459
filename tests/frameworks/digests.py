"""Writes rltrace/hooks/digests.json: what hooks read in the last release of each framework whose source was read.

    python tests/frameworks/digests.py FOLDER

The sources are those that `environments.py` has put into the folder. After a release was read, add it to `RELEASES`
there: the last one of each package is the one whose digests ship.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argument_reads import reads_of, wanted
from environments import RELEASES
from release import Releases, releases_in

from rltrace import plugins
from rltrace.hooks import binding
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.sources import Parameters, digest
from rltrace.instrument.vllm import speculation

FILE = Path(binding.__file__).with_name("digests.json")


def last_releases() -> dict[str, str]:
    """The last release of each package that was read."""
    return {package: versions[-1] for package, versions in RELEASES.items()}


def read_all(releases: Releases) -> dict[str, Any]:
    """What ships: of all hooks, as they are in these releases."""
    digests: dict[str, str | None] = {}
    parameters: dict[str, Any] = {}
    for name in plugins.INSTRUMENTATIONS:
        patches = releases.hooks(name)
        if name == "vllm":
            name_possible_drafts(patches)
        for hook in patches.hooks:
            if releases.has(_package(hook.target)):
                digests |= digests_of(releases, (hook.target, *patches.reads.get(hook.target, ())))
                if found := parameters_read(releases, patches, hook.target):
                    parameters.setdefault(name, {})[hook.target] = found
    return {"versions": dict(releases.versions), "digests": dict(sorted(digests.items())), "parameters": parameters}


def name_possible_drafts(patches: PatchSet) -> None:
    """Name the hooks on what vLLM may guess by: in a run, only that on what it does guess by is named."""
    for target in speculation.SPECULATORS:
        speculation.name_draft_hook(patches, target)


def digests_of(releases: Releases, names: tuple[str, ...]) -> dict[str, str | None]:
    """The digest of each target or attribute that has a source."""
    found = {name: releases.source.find(name) for name in names}
    return {name: None if node is None else digest(node) for name, node in found.items()}


def parameters_read(releases: Releases, patches: PatchSet, target: str) -> Mapping[str, int | None]:
    """The parameters of a target that its hook reads in these releases, with their places.

    Raises:
        LookupError: One is not where the hook reads it.
    """
    node = releases.source.find(target)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {}
    reads = {read for reader in patches.readers.get(target, ()) for read in reads_of(reader)}
    try:
        return wanted(reads, Parameters.of(node))
    except LookupError as error:
        raise LookupError(f"{patches.instrumentation} {target}: {error}") from error


def written(read: Mapping[str, Any]) -> str:
    """The text of the file."""
    return json.dumps(read, indent=1) + "\n"


def _package(target: str) -> str:
    return target.partition(":")[0].partition(".")[0]


if __name__ == "__main__":
    FILE.write_text(written(read_all(releases_in(Path(sys.argv[1], "sources"), last_releases()))))
