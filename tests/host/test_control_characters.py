"""Names in a Recording are text to a terminal: none sets its title, its clipboard or its cursor."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from recordings import Written, hook, sample, span
from rich.text import Text

from rltrace.cli import main
from rltrace.cli.exec import _say as say_how_it_ended
from rltrace.cli.tables import console
from rltrace.cli.tables.fit import Figures
from rltrace.host.control_characters import in_json, visible, visible_lines
from rltrace.read import ending
from rltrace.run.supervisor import Outcome

ATTACKS = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJmIC8=\x1b\\",
    "cursor": "\x1b[2J\x1b[H",
    "eight bits": "\x9b2J\x9d0;owned\x9c",
    "over": "\rnothing lost\b\b\x7f",
    "bidi": "\u202etxt.exe\u2066\u200f\u061c",
    "line": "\nrltrace: all is well\u2028\u2029\x85\x0b\x0c",
    "markup": "[red]x[/red][link=https://evil.test]y[/link]:boom:",
}
EVIL = "".join(ATTACKS.values())
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
COLOUR = re.compile("\x1b\\[[0-9;]*m")


def run_of(folder: Path) -> Path:
    """A Recording that has all attacks in every text that it may say."""
    written = Written(folder, **{f"seed {EVIL}": EVIL})
    device = {"host": f"host {EVIL}", "uuid": f"uuid {EVIL}", "name": f"card {EVIL}"}
    who: dict[str, Any] = {"role": f"role {EVIL}", "host": f"host {EVIL}", "device": device, "name": f"name {EVIL}"}
    hooks = (
        hook(1, f"m:never {EVIL}", emits=[f"emits {EVIL}"]),
        hook(2, f"m:failed {EVIL}", "failed", reason=f"reason {EVIL}", instrumentation=f"i {EVIL}"),
        hook(3, f"m:skipped {EVIL}", "skipped", reason=f"reason {EVIL}"),
    )
    records = [span("step", 0, 10, step=0), span("step", 10, 20, step=1)]
    records += [span(f"act {EVIL}", at, at + 5, phase=True, error=f"error {EVIL}") for at in (1, 11)]
    records += [span("weight_sync", 16, 18), span(f"open {EVIL}", 19, None), span(f"in {EVIL}", 12, 13)]
    records += [sample(f"owner {EVIL}_bytes", at, 4096) for at in (1, 11)]
    for key in (f"one {EVIL}".replace("/", "|"), "two"):
        written.process(key, *records, rank=None if key == "two" else 0, hooks=hooks, **who)
        lines = folder / "processes" / key / "process.jsonl"
        said = [{"kind": "unavailable", "what": f"what {EVIL}", "reason": f"why {EVIL}"}]
        lines.write_text(lines.read_text() + "".join(json.dumps(line) + "\n" for line in said))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"command": ["python", f"train {EVIL}"], "versions": {f"torch {EVIL}": f"2 {EVIL}"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    untraced = {"pid": 3, "command": [f"python {EVIL}"], "reason": f"none {EVIL}", "missed": True}
    (folder / "untraced.jsonl").write_text(json.dumps(untraced) + "\n")
    ending.write(folder, ending.Ending(3, None))
    os.mkfifo(folder / f"{EVIL.replace('/', '|')}.json")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_of(tmp_path / f"run {EVIL}".replace("/", "|"))


def call(*words: str | Path) -> Result:
    """With `color`: click would take out escapes by itself where it prints to no terminal."""
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="rltrace", color=True)


COMMANDS: dict[str, Callable[[Path], list[str | Path]]] = {
    "summary": lambda run: ["summary", run],
    "all": lambda run: ["summary", "--all", run],
    "json": lambda run: ["summary", "--json", run],
    "diff": lambda run: ["diff", run, run],
    "diff json": lambda run: ["diff", "--json", run, run],
    "export": lambda run: ["export", run, "-o", run / "trace.pftrace"],
    "collect": lambda run: ["collect", run],
    "unknown format": lambda run: ["export", run, "--to", EVIL, "-o", "x"],
    "no such run": lambda run: ["summary", run / EVIL],
    "two such runs": lambda run: ["diff", run / EVIL, EVIL],
    "no measurement": lambda run: ["overhead", run],
    "no configuration": lambda run: ["run", run / f"{EVIL}.yaml"],
    "no program": lambda run: ["exec", "--", EVIL],
    "no command": lambda run: [EVIL],
    "no option": lambda run: [f"--{EVIL}"],
    "doctor": lambda run: ["doctor", "--", EVIL],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_name_reaches_the_terminal(
    run: Path, command: Callable[[Path], list[str | Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command lets a name's control characters reach the terminal."""
    monkeypatch.chdir(tmp_path)
    done = call(*command(run))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    said = done.stdout + done.stderr
    assert OBEYED.findall(said) == []
    assert "\\x1b" in "".join(said.split()) or "\\u001b" in said
    assert "\nrltrace: all is well" not in said


def test_json_keeps_the_name(run: Path) -> None:
    """JSON has names as the Recording has them."""
    found = json.loads(call("summary", "--json", run).stdout)
    assert found["run"]["command"] == ["python", f"train {EVIL}"]
    assert any(EVIL in process["role"] for process in found["processes"])


def test_terminal_gets_only_colours(run: Path) -> None:
    """A terminal gets colours and no other control sequence.

    A real one: rich and click print to it as they do to none else.
    """
    ours, its = pty.openpty()
    program = "import sys; from rltrace.cli import main; main()"
    command = [sys.executable, "-c", program, "summary", "--all", str(run)]
    child = subprocess.Popen(command, stdout=its, stderr=its, env={**os.environ, "TERM": "xterm-256color"})
    os.close(its)
    said = b""
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # its other end was closed
        pass
    assert child.wait() == 0
    text = said.decode().replace("\r\n", "\n")
    assert COLOUR.search(text)
    assert OBEYED.findall(COLOUR.sub("", text)) == []
    assert "[red]x[/red]" in "".join(COLOUR.sub("", text).split())


def test_exec_says_plain_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `exec` says at its end is plain text."""
    say_how_it_ended(run, Outcome(3, [f"worker {EVIL} died"], None))
    said = capsys.readouterr().err
    assert "died" in said and "not traced: python" in said and OBEYED.findall(said) == []
    assert "\nrltrace: all is well" not in said


def test_table_width_is_of_shown_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A table is as wide as the text that is shown.

    And what no table made visible before, the console does.
    """
    screen = console()
    screen.print(Text("a\x1b]0;t\x07b\nc"))
    screen.print("[red]x[/red] :boom:")
    table = Figures("name", "count")
    table.add_row("a\x1b[2J", "1")
    screen.print(table)
    said = capsys.readouterr().out
    assert said.startswith("a\\x1b]0;tb\nc\n[red]x[/red] :boom:\n")
    assert "a\\x1b[2J" in said and OBEYED.findall(said) == []


def test_each_control_character_is_shown() -> None:
    """Each character that a terminal would obey is shown."""
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        obeyed = unicodedata.category(character) in ("Cc", "Zl", "Zp")
        obeyed |= unicodedata.bidirectional(character) in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )
        obeyed |= character in "\u200e\u200f\u061c"
        assert (visible(character) != character) == obeyed, hex(number)
        assert (visible_lines(character) != character) == (obeyed and character != "\n")
    assert visible("é 漢 🙂 \t\n\x1b\x9b\u2028") == "é 漢 🙂 \\t\\n\\x1b\\x9b\\u2028"


def test_json_stays_json() -> None:
    text = json.dumps({EVIL: [EVIL]}, ensure_ascii=False, indent=2)
    assert json.loads(in_json(text)) == {EVIL: [EVIL]}
    assert OBEYED.findall(in_json(text)) == [] and OBEYED.findall(text) != []


def test_one_way_to_the_terminal() -> None:
    """Commands have one way to the terminal.

    A `click.echo` or a `print` of its own would bring names there as they are.
    """
    folder = Path(main.__module__.replace(".", "/"))
    root = Path(__file__).parents[2]
    allowed = {"echo.py", "as_json.py"}
    found = []
    for path in (root / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "print",
                "click.echo",
                "click.secho",
                "Console",
            ):
                found.append((path.name, ast.unparse(node)))
    assert {name for name, _ in found} == {*allowed, "__init__.py"}
    assert [call for name, call in found if name == "__init__.py"] == ["click.echo(error.format_message(), err=True)"]
