"""Writes `docs/support.md` from the tables of hooks: `python docs/support.py`, or `make docs`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rltrace import plugins
from rltrace.events import AGENT_REQUEST, REQUEST, SERVER_REQUEST, SLEEP, STARTUP_PHASES, STEP, STEP_PHASES, WAKE_UPS
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.verl.hook_points import FIRST, HOOK_POINTS, LAST

PAGE = Path(__file__).with_name("support.md")
HEAD = """\
<!-- Written by docs/support.py from the tables of hooks: change those, or SHOWN there, then run `make docs`. -->

# What is supported, and how that was shown

Of each framework what its hooks can record, by their own tables. What an engine does below a trainer is in the
engine's row. *Called on a CPU* is the real package in the tests, in a program that uses it; *run on GPUs* is what
`tests/gpu` did. What was only read in the source is not in this table. [What is traced](versions.md) has every row of
hooks.

"""
COLUMNS = ("framework", "versions", "steps", "phases of a step", "start-up", "weight sync", "memory", "requests")
RELEASES = "tests/verl_releases/test_verl_releases.py"
ON_SGLANG = "tests/gpu/test_gpu_sglang.py"
OTEL = "tests/frameworks/test_opentelemetry_releases.py"
SHOWN = {
    "torch": (("2.13", "CPU", "tests/instrument/test_fsdp.py"), ("2.11", "GPU", "tests/gpu/test_gpu_memory.py")),
    "transformers": (("5.24", "CPU", "tests/instrument/test_any_loop.py"),),
    "peft": (("0.21", "CPU", "tests/frameworks/test_peft.py"),),
    "ray": (("2.60", "CPU", "tests/instrument/test_ray.py"),),
    "opentelemetry-api": (("1.20", "CPU", OTEL), ("1.30", "CPU", OTEL), ("1.45", "CPU", OTEL)),
    "opentelemetry-sdk": (("1.20", "CPU", OTEL), ("1.30", "CPU", OTEL), ("1.45", "CPU", OTEL)),
    "requests": (("2.34", "CPU", "tests/instrument/test_trace_context.py"),),
    "httpx": (("0.28", "CPU", "tests/instrument/test_trace_context.py"),),
    "aiohttp": (("3.14", "CPU", "tests/instrument/test_trace_context.py"),),
    "tensorboard": (("2.21", "CPU", "tests/instrument/test_trackers.py"),),
    "tensorboardX": (("2.6", "CPU", "tests/instrument/test_trackers.py"),),
    "wandb": (("0.31", "CPU", "tests/instrument/test_trackers.py"),),
    "vllm": (("0.32", "CPU", "tests/frameworks/test_vllm_cpu.py"), ("0.24", "GPU", "tests/gpu/test_gpu_memory.py")),
    "sglang": (("0.5.12", "CPU", "tests/frameworks/test_sglang_cpu.py"), ("0.5.12", "GPU", ON_SGLANG)),
    "torch_memory_saver": (("0.0.10", "GPU", ON_SGLANG),),
    "trl": (("1.16", "CPU", "tests/frameworks/test_trl.py"), ("1.16", "GPU", "tests/gpu/test_gpu_trl.py")),
    "verl 0.4": (("0.4.1", "CPU", RELEASES),),
    "verl 0.5": (("0.5.0", "CPU", RELEASES),),
    "verl 0.6": (("0.6.1", "CPU", RELEASES),),
    "verl 0.7": (("0.7.1", "CPU", RELEASES), ("0.7.1", "GPU", "tests/gpu/verl_run.py")),
    "verl 0.8": (("0.8.0", "CPU", RELEASES), ("0.8.0", "GPU", "tests/gpu/verl_run.py")),
    "verl 0.9": (("0.9.1", "CPU", RELEASES), ("0.9.1", "GPU", "tests/gpu/test_gpu_verl.py")),
    "openrlhf": (("0.11.2", "CPU", "tests/frameworks/test_openrlhf.py"),),
    "areal": (("1.0.4", "CPU", "tests/frameworks/test_areal.py"),),
    "skyrl": (("0.3.0", "CPU", "tests/frameworks/test_skyrl.py"),),
}  # fmt: skip
"""Of a framework, or of one of its lines: which release was called where, and the file that does it."""
WAYS = {"CPU": "called on a CPU", "GPU": "run on GPUs"}
LEDGERS = {
    "torch": "owners of a rank",
    "vllm": "pools by tag",
    "sglang": "pools by tag",
    "torch_memory_saver": "pools by tag",
}
"""Whose hooks sample bytes by owner: that is no span, so no hook's table says it."""


class Row(NamedTuple):
    """A framework, or a line of its releases."""

    framework: str
    versions: str
    emits: frozenset[str]


class Nobody:
    """Where hooks report to; nobody reads it."""

    def hook(self, *_: Any, **__: Any) -> Nobody:
        """Take no notice."""
        return self

    def fired(self) -> None:
        """Take no notice."""

    def spent(self, _spent_ns: int) -> None:
        """Take no notice."""


class NamedHooks(PatchSet):
    """Collects hooks and binds none; those that wait for an import are named at once where nothing has to be there."""

    def __init__(self) -> None:
        super().__init__("support", Nobody())
        self.refuse("only named")

    def when_imported(self, module: str, function: Callable[..., Any]) -> None:
        """Name what waits for a module, unless it asks that module which release it is."""
        try:
            function(self)
        except ImportError:
            pass

    def emits(self) -> frozenset[str]:
        """The names of all spans that the hooks write."""
        return frozenset(name for hook in self.hooks for name in hook.emits)


def rows() -> Iterator[Row]:
    """Every framework that a hook is for, in the order of the table of instrumentations; verl by its lines."""
    supports: dict[str, list[str]] = {}
    emits: dict[str, set[str]] = {}
    for name in plugins.INSTRUMENTATIONS:
        instrumentation = plugins.load(plugins.INSTRUMENTATIONS[name])
        if not instrumentation.supports or instrumentation.supports[0].startswith("Python"):
            continue
        framework = instrumentation.supports[0].split()[0]
        if framework == "verl":
            continue
        hooks = NamedHooks()
        instrumentation().install(hooks)
        if not hooks.hooks:  # it is off unless somebody asks for it
            continue
        supports.setdefault(framework, []).append(instrumentation.supports[0].removeprefix(framework).strip())
        emits.setdefault(framework, set()).update(hooks.emits())
    for framework, found in emits.items():
        yield Row(framework, min(supports[framework], key=lower_bound), frozenset(found))
    for line in range(FIRST, LAST + 1):
        hooks = NamedHooks()
        for point in HOOK_POINTS:
            if point.is_in(line):
                point.name_hook(hooks, point.target)
        yield Row(f"verl 0.{line}", f">= 0.{line}, < 0.{line + 1}", hooks.emits())


def lower_bound(versions: str) -> list[int]:
    """The numbers of `>= 2.6, < 3` that come first."""
    return [int(number) for number in re.findall(r"\d+", versions.partition(",")[0])]


def cells(row: Row) -> list[str]:
    """One line of the table."""
    startup = [name for name in STARTUP_PHASES if name in row.emits]
    stages = sorted(name.removeprefix("weight_sync.") for name in row.emits if name.startswith("weight_sync."))
    moves = [name.removeprefix("rollout.") for name in (*WAKE_UPS, SLEEP) if name in row.emits]
    moves += [name for name in ("cumem.map", "cumem.unmap") if name in row.emits]
    requests = [name for name in (AGENT_REQUEST, SERVER_REQUEST, REQUEST) if name in row.emits]
    phases = [name for name in STEP_PHASES if name in row.emits and name not in (*WAKE_UPS, SLEEP)]
    return [
        row.framework,
        row.versions,
        "yes" if STEP in row.emits else "",
        listed(phases),
        str(len(startup) or ""),
        listed(stages),
        listed([*([LEDGERS[row.framework]] if row.framework in LEDGERS else []), *moves], code=False),
        listed(requests),
    ]


def listed(names: Iterable[str], *, code: bool = True) -> str:
    """Names as a cell."""
    return ", ".join(f"`{name}`" if code else name for name in names)


def shown(row: Row) -> str:
    """How the row was shown."""
    return "; ".join(f"{version} {WAYS[way]}" for version, way, _ in SHOWN[row.framework])


def page() -> str:
    """The whole page."""
    lines = [f"| {' | '.join((*COLUMNS, 'shown'))} |", "|" + "---|" * (len(COLUMNS) + 1)]
    lines += [f"| {' | '.join((*cells(row), shown(row)))} |" for row in rows()]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
