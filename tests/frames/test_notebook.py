"""What a notebook shows of a Recording: a picture and findings, in a real kernel and in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import nbformat
import pytest
from click.testing import CliRunner
from nbclient import NotebookClient
from recordings import Written, span
from screenshot import browser_page, chromium
from shipped import VERL, opened

import rltrace
from rltrace.cli import main
from rltrace.frames.tables import Tables

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"

MOST_BYTES = 100_000
"""Of a cell: a notebook that is saved keeps each."""

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def verl() -> Tables:
    return Tables(opened(VERL))


def called_without(package: str, code: str, *arguments: Path) -> str:
    """What a program prints where a package is not installed."""
    program = f"import sys; sys.modules[{package!r}] = None; import rltrace; run = rltrace.open(sys.argv[1])\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout


class Tags(HTMLParser):
    """Tags and attributes of a piece of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag, *(name for name, _ in attrs)]


# ---- the example ------------------------------------------------------------------------------------------------


def test_the_example_runs(verl: Tables) -> None:
    """The notebook that ships runs in a real kernel, and each of its cells shows what its text says."""
    book = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    shown = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    assert [len(outputs) for outputs in shown] == [0, 1, 1, 1, 1, 1]
    picture, said, *frames = (outputs[0] for outputs in shown[1:])
    assert "<svg" in picture.data["text/html"] and "rank 3" in picture.data["text/html"]
    assert verl.findings()[0].title in said.text
    phases, updates, synced = (frame.data["text/plain"] for frame in frames)
    assert "actor.update" in phases and "weight_sync" in phases
    assert re.search(r"(?m)^\d+ +\d+ +\d+\.\d+$", updates)
    assert "gigabytes_per_second" in synced and len(synced.splitlines()) > 12


def test_the_example_has_no_output() -> None:
    """The notebook is kept as it is before it runs: what it shows is made where it is read."""
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if cell.cell_type == "code")


# ---- findings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [{}, {"steps": "2-3", "ranks": "0,1"}], ids=["whole", "part"])
def test_findings_are_those_of_why(chosen: dict[str, str]) -> None:
    """`findings` has the values that `rltrace why --json` prints, of a part of a run too."""
    words = [word for name, value in chosen.items() for word in (f"--{name}", value)]
    done = CliRunner().invoke(main, ["why", str(VERL), "--json", *words])
    found: Any = rltrace.open(VERL, **chosen).findings()
    assert msgspec.to_builtins(found) == json.loads(done.stdout)["findings"] != []


# ---- the cell ---------------------------------------------------------------------------------------------------


def test_the_cell_is_small_and_still(verl: Tables) -> None:
    """A cell has every finding and rank, no script, and nothing that is loaded."""
    cell = verl._repr_html_()
    assert len(cell.encode()) < MOST_BYTES
    assert not {"script", "src", "href", "link", "iframe", "data-tip"} & {*Tags(cell).found}
    assert all(f"rank {rank}" in cell for rank in range(4))
    text = re.sub(r"<[^>]+>", "", cell)
    assert [text.index(found.title.replace("'", "&#39;")) for found in verl.findings()]


@pytest.mark.parametrize("package", [None, "jinja2"])
def test_names_are_escaped(tmp_path: Path, package: str | None) -> None:
    """Whatever a name in a Recording is, nothing of it is a tag: drawn, and in words."""
    folder = tmp_path / "<img src=y onerror=alert(1)>"
    Written(folder).process(
        "one", *(span("step", at, at + 10, step=at) for at in (0, 10, 20)),
        *(span(HOSTILE, at, at + 5, phase=True) for at in (0, 10, 20)), role="worker", rank=0,
    )  # fmt: skip
    asked = "print(run._repr_html_())"
    cell = called_without(package, asked, folder) if package else rltrace.open(folder)._repr_html_()
    assert not {"img", "script", "onerror"} & {*Tags(cell).found}
    assert "&lt;img src=y" in cell and ("&lt;script&gt;" in cell or package)


def test_a_run_without_phases_says_so(tmp_path: Path) -> None:
    """A Recording that has nothing to draw says what it lacks."""
    folder = Written(tmp_path / "run").process("one", span("a", 0, 1)).folder
    assert "No phase was recorded" in rltrace.open(folder)._repr_html_()


IN_A_NOTEBOOK = """<!DOCTYPE html><style>body {{ background: #fff }}</style>
<p id="theirs" class="note bar finding-title"><code>theirs</code></p>{cell}"""

STYLE_OF_THEIRS = """() => [...document.querySelectorAll('#theirs, #theirs code')].map((one) => {
    const style = getComputedStyle(one);
    return [style.color, style.backgroundColor, style.fontSize, style.fontWeight, style.margin, style.boxSizing];
})"""


@pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")
def test_the_cell_styles_itself_only(verl: Tables, tmp_path: Path) -> None:
    """In a browser the cell has its style and the notebook keeps its own; nothing overflows or is asked for."""
    file, plain = tmp_path / "with.html", tmp_path / "without.html"
    file.write_text(IN_A_NOTEBOOK.format(cell=verl._repr_html_()))
    plain.write_text(IN_A_NOTEBOOK.format(cell=""))
    with browser_page(900, 900) as browser:
        asked: list[str] = []
        browser.on("request", lambda request: asked.append(request.url))
        browser.goto(plain.as_uri())
        before = browser.evaluate(STYLE_OF_THEIRS)
        browser.goto(file.as_uri())
        assert browser.evaluate(STYLE_OF_THEIRS) == before
        assert browser.evaluate("document.documentElement.scrollWidth") == 900
        row = browser.locator(".rltrace .plot").nth(2).bounding_box()
        title = browser.locator(".rltrace .finding-title").first.evaluate("(one) => getComputedStyle(one).fontWeight")
    assert asked == [plain.as_uri(), file.as_uri()]
    assert row is not None and row["width"] > 600 and row["height"] == 22 and title == "600"


# ---- with the core only -----------------------------------------------------------------------------------------


def test_without_jinja2_findings_are_shown(verl: Tables) -> None:
    """Without what draws the picture, a cell lists the findings, and says which extra draws it."""
    cell = called_without("jinja2", "print(run._repr_html_())", VERL)
    assert "needs jinja2, which is not installed here: pip install &#x27;jinja2&gt;=" in cell and "[report]" in cell
    assert cell.count("<li>") == len(verl.findings())


def test_without_arrow_tables_name_the_extra(verl: Tables) -> None:
    """Without Arrow a Recording opens, shows its picture and its findings; a table says which extra it needs."""
    code = """
from rltrace.errors import MissingExtraError
print(len(run.findings()), "<svg" in run._repr_html_())
for ask in (run.phases, run.spans, lambda: run.sql("select 1")):
    try:
        ask()
    except MissingExtraError as error:
        print(error)
"""
    lines = called_without("pyarrow", code, VERL).splitlines()
    assert lines[0] == f"{len(verl.findings())} True"
    assert len(lines) == 4 and all("'pyarrow>=" in line and "[sql]" in line for line in lines[1:])
