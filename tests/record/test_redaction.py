"""Secrets reach neither a Recording nor what is said of it, whichever way they come in."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rltrace.cli import main
from rltrace.read.recording import Recording
from rltrace.record import redaction

SECRET = "5up3rs3cr3t"

PROGRAM = f"""
import sys
import msgspec
import rltrace
from rltrace.record import lifecycle, spans
from rltrace.record.announcement import complain
rltrace.start("mine", config={{"wandb": {{"api_key": "a{SECRET}"}}, "headers": {{"X-Team": "b{SECRET}"}},
                              "login": "wandb login --password c{SECRET}"}})
lifecycle.unavailable("tracker", "401: Authorization: Basic d{SECRET}==")
spans.current().hook("ours", "module:function", "failed", "GET https://me:e{SECRET}@host failed")
complain("the tracker refused WANDB_API_KEY=f{SECRET}")
try:
    with rltrace.span("step", step=1):
        raise RuntimeError("HF_TOKEN=g{SECRET} is not valid")
except RuntimeError:
    pass
"""

WORDS = [
    "--api-key", f"h{SECRET}",
    f"--hf-token=i{SECRET}",
    f"trainer.token=j{SECRET}",
    "-H", f"Authorization: Basic k{SECRET}==",
    "-H", f"X-Api-Key: l{SECRET}",
    f"OTEL_EXPORTER_OTLP_HEADERS=api-key=m{SECRET},x-team=n{SECRET}",
    f"export A=1; WANDB_API_KEY=o{SECRET} python train.py --password p{SECRET}",
    f"Cookie: a=q{SECRET}; b=r{SECRET}",
    f"https://host/x?token=s{SECRET}&n=3",
    f"https://t{SECRET}0123456789@host/x",
    f'{{"api_key": "u{SECRET}", "n": 3}}',
    "--rank", "3",
]  # fmt: skip

ENVIRONMENT = {
    "WANDB_API_KEY": f"v{SECRET}",
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer w{SECRET}",
    "HF_TOKEN": f"x{SECRET}",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A Recording of a program that has secrets everywhere, and what was printed meanwhile."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "train.py").write_text(PROGRAM)
    command = ["-c", "from rltrace.cli import main; main()", "exec", "--out", "run", "--", sys.executable, "train.py"]
    done = subprocess.run(
        [sys.executable, *command, *WORDS], cwd=folder, env={**clean(), **ENVIRONMENT}, check=False,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout + done.stderr


def clean() -> dict[str, str]:
    """The tests' own environment, untraced."""
    import os

    return {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}


def test_nothing_of_it_is_on_the_disk(run: tuple[Path, str]) -> None:
    """No file of the Recording has one of the secrets, and what is no secret is still there."""
    files = [path for path in run[0].rglob("*") if path.is_file()]
    leaked = {letter.decode() for path in files for letter in re.findall(b"(.)" + SECRET.encode(), path.read_bytes())}
    assert len(files) > 5 and leaked == set()
    command = Recording.open(run[0]).manifest["command"]
    assert command[-2:] == ["--rank", "3"] and "n=3" not in command
    assert any(word.startswith("https://host/x?token=[redacted]") for word in command)
    assert "export A=1; WANDB_API_KEY=[redacted] python train.py --password [redacted]" in command


def test_nothing_of_it_is_printed(run: tuple[Path, str], tmp_path: Path) -> None:
    """Neither the run nor any reader prints one: screens, JSON, the report, the timeline."""
    said = [run[1]]
    for words in (["summary", "--all"], ["summary", "--json"], ["why", "--json"]):
        said.append(printed([*words, str(run[0])]))
    said.append(printed(["ls", str(run[0].parent), "--json"]))
    for name, words in {"a.html": ["report"], "b.pftrace": ["export"]}.items():
        printed([*words, str(run[0]), "-o", str(tmp_path / name)])
        said.append((tmp_path / name).read_bytes().decode(errors="replace"))
    assert "WANDB_API_KEY=[redacted]" in said[0] and "[redacted]" in said[2]
    assert [re.findall(f"(.){SECRET}", text) for text in said] == [[]] * 7


def printed(words: list[str]) -> str:
    """What a command prints."""
    from click.testing import CliRunner

    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    "said",
    [
        "a step takes 3 s; write --steps 3, 100-110 or 1,5-7",
        "max_tokens=5 tokenizer=x monkey: 1",
        "the keys are in docs/json.md: see there",
        "https://host:80/x and user@host",
        "--keyboard us --author me",
        "csv header: True",
    ],
)
def test_what_is_no_secret_stays(said: str) -> None:
    """A sentence without a secret stays as it is."""
    assert redaction.text(said) == said


@pytest.mark.parametrize(
    "piece", ["x", "a=b ", "x:", "'", "headers", "headers=;", "://", "--a ", "key=", "key: ", "a@"]
)
def test_a_long_text_takes_no_longer(piece: str) -> None:
    """Whatever a long message consists of, its secrets are taken out in a time that grows with its length alone."""
    said = piece * (200_000 // len(piece))
    before_s = time.process_time()
    redaction.text(said)
    assert time.process_time() - before_s < 3
