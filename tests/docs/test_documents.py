"""The documents keep what they promise: their commands run, their links lead somewhere, they stay short."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import FOLDERS, ROOT, anchors, blocks, documents, links, paths, prose
from warm_python import warm

SHELL, PYTHON = {"sh"}, {"python"}
BASH = ("bash", "-euo", "pipefail", "-c")
PLAIN = re.compile(r"""rltrace (?!exec|view)([\w ./=%,-]|"[\w ./=%,'*()-]*")*(#.*)?""")
"""A command of rltrace's that ends by itself, of words in which a shell finds nothing of its own."""
NO_COMMANDS = {"text", "yaml", "json", "toml", "jsonl", "sql"}
VARIABLE = re.compile(r"\bRLTRACE_[A-Z][A-Z_]*\b")
PROGRAM = """\
import time
import rltrace

rltrace.identify(role="worker", rank=0, device={"host": "here", "uuid": "GPU-0"})
for step in range(3):
    with rltrace.span("step", step=step):
        for phase, bytes_held in (("rollout.generate", 10 << 20), ("actor.update", 70 << 20)):
            with rltrace.phase(phase):
                rltrace.counter("actor.grads_bytes", bytes_held)
                rltrace.counter("actor.params_bytes", 40 << 20)
                time.sleep(0.01)
"""
"""The `train.py` of the documents: a rank that says what it holds."""

RLTRACE = """\
#!/bin/sh
# `rltrace view` goes on until somebody ends it: here, once it serves. All else is as it is.
if [ "$1" != view ]; then exec {rltrace} "$@"; fi
{rltrace} "$@" --no-open >view.out 2>&1 &
viewer=$!
until grep -q Ctrl-C view.out || ! kill -0 $viewer; do sleep 0.05; done
kill -TERM $viewer; wait $viewer; code=$?
cat view.out
[ $code = 143 ]
"""

every_document = pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the documents take it: a program, and Recordings of it in `rltrace-runs` and `runs`."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "train.py").write_text(PROGRAM)
    (folder / "bin").mkdir()
    command = folder / "bin" / "rltrace"
    command.write_text(RLTRACE.format(rltrace=Path(sys.executable).with_name("rltrace")))
    command.chmod(0o755)
    run(["rltrace", "exec", "--", "python", "train.py"], folder, folder)
    for name in ("before", "after"):
        shutil.copytree(next((folder / "rltrace-runs").iterdir()), folder / "runs" / name)
    return folder


@pytest.fixture
def folder(workplace: Path, tmp_path: Path) -> Path:
    """A copy of it for one document."""
    place = tmp_path / "place"
    shutil.copytree(workplace, place, ignore=shutil.ignore_patterns("bin"))
    for name in ("examples", "docs"):
        (place / name).symlink_to(ROOT / name)
    return place


def environment_in(workplace: Path) -> dict[str, str]:
    """That of a command: ours, with `rltrace` as this workplace has it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
    path = os.pathsep.join([str(workplace / "bin"), str(Path(sys.executable).parent), environment["PATH"]])
    return {**environment, "PATH": path}


def run(command: list[object], folder: Path, workplace: Path) -> str:
    """What a command says; it must end well."""
    done = subprocess.run(
        [str(word) for word in command],
        check=False,
        cwd=folder,
        env=environment_in(workplace),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_shell(text: str, folder: Path, workplace: Path) -> None:
    """Run a block of shell; its plain commands in forked children of a Python that has imported what they import."""
    for is_plain, lines in itertools.groupby(text.splitlines(), lambda line: PLAIN.fullmatch(line) is not None):
        if not is_plain:
            run([*BASH, "\n".join(lines)], folder, workplace)
            continue
        for words in (shlex.split(line, comments=True) for line in lines):
            command = Path(sys.executable).with_name(words[0])
            done = warm("rltrace.__main__").run(command, environment_in(workplace), folder, 200, words[1:])
            assert done.returncode == 0, done.stdout + done.stderr


@every_document
def test_commands_run(document: Path, folder: Path, workplace: Path) -> None:
    """Every block of shell and Python runs in order and ends well, unless the line above says why not.

    The commands of the README are started as a reader starts them, each as a process of its own.
    """
    for block in blocks(document.read_text()):
        place = f"{document.relative_to(ROOT)}:{block.line}"
        assert block.language in SHELL | PYTHON | NO_COMMANDS, f"{place}: a block in {block.language or 'no language'}"
        if block.language in NO_COMMANDS or block.no_run:
            continue
        try:
            if block.language in PYTHON:
                run([sys.executable, "-c", block.text], folder, workplace)
            elif document == ROOT / "README.md":
                run([*BASH, block.text], folder, workplace)
            else:
                run_shell(block.text, folder, workplace)
        except AssertionError as error:
            raise AssertionError(f"{place}: {error}") from None


@every_document
def test_commands_are_in_blocks(document: Path) -> None:
    """An indented command would be run by nobody."""
    for number, line in prose(document.read_text()):
        assert not re.match(r" {4,}(rltrace|python3?|pip|make|RLTRACE_\w+=\S+) ", line), f"{document}:{number}: {line}"


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    for number, target in links(document.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (document.parent / path).resolve() if path else document
        place = f"{document.relative_to(ROOT)}:{number}: {target}"
        assert file.exists(), f"{place}: there is no {path}"
        assert file.is_relative_to(ROOT), f"{place}: lies outside of the repository"
        assert not anchor or anchor in anchors(file.read_text()), f"{place}: no heading #{anchor}"


@every_document
def test_named_files_exist(document: Path) -> None:
    """A file that moves takes its name in the documents along."""
    for number, path in paths(document.read_text()):
        assert (ROOT / path).exists(), f"{document.relative_to(ROOT)}:{number}: there is no {path}"


def test_named_code_exists() -> None:
    """Each name in the table of what to change is in one of the files that its row names."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to change what")[2].partition("\n## ")[0]
    rows = [re.findall(r"`([^`]+)`", line) for line in section.splitlines() if line.startswith("| ")]
    checked = 0
    for row in rows:
        text = "".join((ROOT / code).read_text() for code in row if code.endswith(".py"))
        for name in (code for code in row if re.fullmatch(r"\w+(\.\w+)?", code) and text):
            assert all(re.search(rf"\b{part}\b", text) for part in name.split(".")), f"{name} is in none of {row}"
            checked += 1
    assert checked > 20


def test_site_builds(tmp_path: Path) -> None:
    """mkdocs finds every page, picture and heading that another page names."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr


def test_readme_is_short() -> None:
    """At most 900 words, as `wc -w` counts them."""
    assert len((ROOT / "README.md").read_text().split()) <= 900


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "docs"])
def test_readmes_of_folders_are_short(folder: str) -> None:
    for readme in (ROOT / folder).rglob("README.md"):
        assert len(readme.read_text().splitlines()) <= 30, readme


def test_every_variable_is_documented() -> None:
    """The table of `RLTRACE_*` in docs/your-program.md is complete, and names none that is gone."""
    sources = [ROOT / "Makefile"]
    for folder in ("rltrace", "exporters", "reference_run", "tests/frameworks"):
        sources += [file for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".pth"}]
    used = {name for file in sources for name in VARIABLE.findall(file.read_text())}
    table = (ROOT / "docs" / "your-program.md").read_text()
    assert used == set(re.findall(r"^\| `(RLTRACE_\w+)", table, re.MULTILINE))
