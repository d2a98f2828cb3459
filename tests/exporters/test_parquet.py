"""`rltrace export --to parquet`: a folder with a file for each table."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from recordings import two_ranks
from rltrace_exporters import parquet
from shipped import QWEN, opened

from rltrace.cli import main
from rltrace.frames.schema import TABLES
from rltrace.frames.tables import Tables


def export(run: Path, *words: object) -> Result:
    return CliRunner().invoke(main, ["export", str(run), *map(str, words)], prog_name="rltrace")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return two_ranks(tmp_path / "run").folder


def test_files_are_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table is a file with its rows, whole or in groups, and texts are texts."""
    monkeypatch.setattr(parquet, "ROWS", 10_000)
    out = tmp_path / "qwen.parquet"
    assert export(QWEN, "-o", out).exit_code == 0
    assert {file.name for file in out.iterdir()} == {f"{name}.parquet" for name in TABLES}
    tables = Tables(opened(QWEN))
    for name in TABLES:
        found = pyarrow.parquet.read_table(out / f"{name}.parquet")
        assert found.equals(tables.table(name).cast(found.schema)), name
        assert not any(pa.types.is_dictionary(field.type) for field in found.schema)
    assert pyarrow.parquet.ParquetFile(out / "spans.parquet").num_row_groups > 2


def test_other_readers(run: Path, tmp_path: Path) -> None:
    """DuckDB reads the files where they are."""
    duckdb = pytest.importorskip("duckdb")
    assert export(run, "--to", "parquet", "-o", tmp_path / "out").exit_code == 0
    asked = duckdb.sql(f"select sum(seconds) from '{tmp_path}/out/phases.parquet' where phase = 'rollout.generate'")
    assert asked.fetchall() == [(9.0,)]


def test_part_of_a_run(run: Path, tmp_path: Path) -> None:
    """Steps and ranks choose what is written."""
    assert export(run, "--steps", "1", "--ranks", "0", "-o", tmp_path / "out.parquet").exit_code == 0
    spans = pyarrow.parquet.read_table(tmp_path / "out.parquet" / "spans.parquet")
    assert set(spans["rank"].to_pylist()) == {None, 0} and set(spans["step"].to_pylist()) == {1}


def test_folders_are_whole_or_left_alone(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is replaced only with --force, and only if it has nothing else; what fails leaves nothing."""
    monkeypatch.chdir(tmp_path)
    done = export(run, "--to", "parquet")
    size_bytes = sum(file.stat().st_size for file in Path("run.parquet").iterdir())
    assert (done.exit_code, done.stderr) == (0, f"run.parquet  {len(TABLES)} files, {size_bytes:,} bytes\n")
    again = export(run, "--to", "parquet")
    assert again.exit_code == 7 and "run.parquet: exists already; overwrite it with --force" in again.stderr
    assert export(run, "--to", "parquet", "--force", "--ranks", "0").exit_code == 0
    (tmp_path / "run.parquet" / "mine.txt").write_text("precious")
    kept = export(run, "--to", "parquet", "--force")
    assert kept.exit_code == 7 and "run.parquet: has other files" in kept.stderr
    assert (tmp_path / "run.parquet" / "mine.txt").read_text() == "precious"
    refused = export(run, "--to", "parquet", "-o", "-")
    assert refused.exit_code == 2 and "this format is a folder; name it with -o" in refused.stderr
    assert "cannot be written: No such file or directory" in export(run, "-o", tmp_path / "no" / "x.parquet").stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.parquet"]
