"""`rltrace summary --watch`, in a real terminal: what it shows of a run, and that the terminal is as it was."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import recordings
from click.testing import CliRunner
from inferred_loops import HOOK, REF, forward, generate, learn
from planted_runs import PlantedRun
from reference_runs import RLTRACE
from rich.console import Console

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.live import DeviceNow, LaneNow, Live, Now, StackNow
from rltrace.cli import main
from rltrace.cli.tables.live import Findings, Heading, LiveScreen
from rltrace.read.following import Follower, Losses
from rltrace.record.manifest import started_ticks

PROGRAM = Path(__file__).parents[1] / "programs" / "watched_run.py"
PROMPT = "PROMPT$"


class Terminal:
    """A terminal of tmux, with a shell in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "PS1": PROMPT, "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        shell = ["sh", "-i"]
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "40", *shell, env=environment)

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        command = ["tmux", "-S", "tmux", *words]  # a socket's whole path may have 107 characters
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=self.folder).stdout

    def type(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def colored(self) -> str:
        return self._tmux("capture-pane", "-p", "-e")

    def state(self) -> str:
        """Whether a program has the whole screen, and whether the cursor is visible."""
        return self._tmux("display-message", "-p", "#{alternate_on} #{cursor_flag} #{pane_title}").strip()

    def until(self, is_so: Callable[[str], object]) -> str:
        deadline = time.monotonic() + 120
        while not is_so(screen := self.screen()):
            assert time.monotonic() < deadline, f"it does not come:\n{screen}"
            time.sleep(0.05)
        return screen

    def end(self) -> None:
        self._tmux("kill-server")


def unwrapped(text: str) -> str:
    """A text without its spaces and lines, which end where the terminal does and a folder's name lets them."""
    return "".join(text.split())


class Watched:
    """A run under `rltrace exec`, and who watches it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.terminal = Terminal(folder)
        self.exec: subprocess.Popen[bytes] | None = None
        words = " ".join(f"'{word}'" for word in (*RLTRACE, "summary", "--watch", str(self.run)))
        self.watching = f"{words}; echo left with $?"

    def begin(self) -> None:
        self.terminal.type(self.watching, "Enter")
        self.waits = self.terminal.until(lambda screen: unwrapped("once it begins") in unwrapped(screen))
        command = [
            *RLTRACE,
            "exec",
            "--out",
            str(self.run),
            "--",
            sys.executable,
            str(PROGRAM),
            "driver",
            str(self.folder),
        ]
        self.exec = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.screen = self.terminal.until(lambda screen: screen.count("in wait for tokens") == 2)

    def go_on(self, place: str) -> None:
        (self.folder / place).touch()

    def is_named_in(self, line: str) -> bool:
        """A line begins with as much of the end of the run's path as there is room for."""
        shown = line.partition(" · ")[0].removeprefix("…").strip()
        return len(shown) > 20 and str(self.run).endswith(shown)

    def end(self) -> None:
        self.terminal.end()
        if self.exec is not None:
            self.exec.terminate()  # and with it what it runs
            self.exec.communicate()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A run that stands in its rollout, and a terminal that shows it."""
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed")
    watched = Watched(tmp_path_factory.mktemp("watched"))
    try:
        watched.begin()
        yield watched
    finally:
        watched.end()


# ---------------------------------------------------------------- one run; the tests follow it in this order


def test_it_waits_for_the_run(watched: Watched) -> None:
    """A view that was begun first says that it waits, and then shows the run."""
    assert unwrapped("no run has begun here") in unwrapped(watched.waits)
    assert watched.is_named_in(watched.screen.splitlines()[0])


def test_everything_is_on_the_screen(watched: Watched) -> None:
    """Phases, memory, rollout, steps with their rewards, and errors, each with its figures."""
    screen = watched.terminal.until(
        lambda screen: "step 2" in screen and "Findings" in screen and "more lines" not in screen
    )
    for rank in range(2):
        assert re.search(rf"^rank {rank} +rollout.generate +[\d.]+ s +in wait for tokens", screen, re.MULTILINE)
        assert re.search(rf"^rank {rank} ▕█+░+▏ 9.0 GiB", screen, re.MULTILINE)
    assert "rollout.kv_cache 6.0 GiB" in screen and "actor.params 2.0 GiB" in screen and "other 1.0 GiB" in screen
    assert re.search(r"[\d.]+ tokens/s over the last 10 s · 14 requests running, 6 waiting · 2 engines", screen)
    assert re.search(r"^ +1 +0.\d\d +0.5000 +1,234", screen, re.MULTILINE)
    assert screen.count("ValueError in tool.call") == 2


def test_names_cannot_steer_the_terminal(watched: Watched) -> None:
    """Control characters of a Recording are shown, and not obeyed."""
    screen = watched.terminal.screen()
    assert r"no such \x1b[31mtool" in screen
    assert "owned" not in watched.terminal.state()


def test_it_fits_after_a_resize(watched: Watched) -> None:
    """A smaller terminal has the same in fewer lines, and a larger one has it back."""
    watched.terminal.resize(80, 24)
    screen = watched.terminal.until(lambda screen: len(screen.splitlines()) <= 24 and "Rollout" in screen)
    assert watched.is_named_in(screen.splitlines()[0])
    for heading in ("Ranks", "Memory", "Rollout", "Steps", "Errors"):
        assert heading in screen
    assert "▏ 9.0 GiB" in screen
    watched.terminal.resize(100, 40)
    watched.terminal.until(lambda screen: screen.count("ValueError in tool.call") == 2)


def test_a_pipe_gets_one_picture_after_the_other(watched: Watched) -> None:
    """Without a terminal there are no colours and no control sequences, and Ctrl-C ends in good order."""
    command = [*RLTRACE, "summary", "--watch", str(watched.run)]
    piped = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert piped.stdout is not None
    heads, lines = 0, []
    for line in piped.stdout:
        lines.append(line)
        heads += watched.is_named_in(line)
        if heads == 2 or len(lines) == 200:
            break
    piped.send_signal(signal.SIGINT)
    rest, errors = piped.communicate()
    assert (heads, piped.returncode, errors) == (2, 0, "")
    said = "".join(lines) + rest
    assert "rollout.generate" in said and "\x1b" not in said and re.search(r"rank 0 ▕a+b+░", said)


def test_ctrl_z_lends_the_terminal_back(watched: Watched) -> None:
    """While the view is stopped the shell has its terminal, and then the view has it again."""
    watched.terminal.type("C-z")
    watched.terminal.until(lambda screen: "topped" in screen and watched.terminal.state().startswith("0 1"))
    watched.terminal.type("fg; echo left with $?", "Enter")
    watched.terminal.until(lambda screen: "Rollout" in screen and watched.terminal.state().startswith("1 0"))


def test_ctrl_z_in_the_middle_of_a_picture(watched: Watched) -> None:
    """A picture that is being drawn is finished first: the shell gets its own screen and a cursor."""
    for columns in range(90, 110):
        watched.terminal.resize(columns, 40)  # draws anew
        watched.terminal.type("C-z")
        watched.terminal.until(lambda screen: watched.terminal.state().startswith("0 1"))
        watched.terminal.type("clear; echo it was here; fg; echo left with $?", "Enter")
        watched.terminal.until(lambda screen: "Rollout" in screen and watched.terminal.state().startswith("1 0"))


def test_ctrl_c_gives_the_terminal_back(watched: Watched) -> None:
    """What was there before is there again, with its cursor; and the run goes on."""
    assert watched.terminal.state().startswith("1 0")
    watched.terminal.type("C-c")
    screen = watched.terminal.until(lambda screen: "left with 0" in screen)
    assert watched.terminal.state().startswith("0 1") and "it was here" in screen
    assert watched.exec is not None and watched.exec.poll() is None


def test_no_color_is_respected(watched: Watched) -> None:
    """With NO_COLOR owners have letters, and the terminal gets no colour."""
    watched.terminal.type("clear", "Enter")
    watched.terminal.type(f"NO_COLOR=1 {watched.watching}", "Enter")
    watched.terminal.until(lambda screen: re.search(r"rank 0 ▕a+b+░", screen))
    assert not re.search(r"\x1b\[[\d;]*(3[1-7]|38)[;m]", watched.terminal.colored())
    assert watched.terminal.state().startswith("1")


def test_it_follows_and_ends_with_the_first_screen(watched: Watched) -> None:
    """When the run ends, the view ends with what `rltrace summary` prints."""
    watched.go_on("generated")
    watched.terminal.until(lambda screen: screen.count("actor.update") == 2)
    watched.go_on("updated")
    screen = watched.terminal.until(lambda screen: "left with 0" in screen)
    assert unwrapped("--all shows") in unwrapped(screen) and watched.terminal.state().startswith("0 1")
    assert watched.exec is not None and watched.exec.wait() == 0


# ---------------------------------------------------------------- without a terminal


def test_json_is_refused(folder: Path) -> None:
    """What does not go together is said."""
    done = CliRunner().invoke(main, ["summary", "--watch", "--json", str(folder)])
    assert done.exit_code == 2


def test_steps_that_nobody_marks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without marks has its steps, its phase and where it is in it, as far as they are known."""
    learned = [[*generate(at, at + 4), *forward(at + 4, at + 5, REF), *learn(at + 6)] for at in (0, 20)]
    written = recordings.Written(folder)
    written.process("p", *learned, generate(40, None), hooks=(HOOK,), pid=os.getpid(), **_alive())
    live = Live(Follower(written.read()))
    monkeypatch.setattr(TimeLine, "now_ns", lambda _: 42 * recordings.SECOND)
    live.poll()
    screen = drawn(live.now(), 80, 30)
    assert "step 2, 2.0 s in, a step takes 20 s" in screen
    assert re.search(r"process \d+ +rollout.generate +2.0 s +in model.generate 2.0 s", screen)
    assert re.search(r"Steps, inferred from what runs *\n +step +seconds *\n +2 +2.00 … *\n +1 +20.00 *\n", screen)


def test_a_hang_shows_where_threads_stand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing begins or ends for half a minute, what each thread is in comes first."""
    written = recordings.Written(folder)
    for rank in range(2):
        phase, inside = recordings.span("weight_sync", 5 - rank, None), recordings.span("weight_sync.wait", 6, None)
        written.process(f"worker-{rank}", phase, inside, role="worker", rank=rank, pid=os.getpid(), **_alive())
    live = Live(Follower(written.read()))
    live.poll()
    monkeypatch.setattr(TimeLine, "now_ns", lambda _: 50 * recordings.SECOND)
    now = live.now()
    assert now.is_still and now.still_seconds == 44
    assert [(stack.spans, stack.seconds) for stack in now.stacks] == 2 * [(["weight_sync", "weight_sync.wait"], 44.0)]
    screen = drawn(now, 100, 30)
    assert "Nothing has begun or ended for 44 s" in screen
    assert "44 s  weight_sync > weight_sync.wait  2 threads of rank 0 worker, rank 1 worker" in screen


def _alive() -> dict[str, object]:
    return {"start_ticks": started_ticks(os.getpid())}


def drawn(now: Now, columns: int, lines: int, found: Findings | None = None) -> str:
    """A picture, as it is in a terminal of this size."""
    console = Console(width=columns, height=lines, no_color=True, force_terminal=True, color_system=None)
    options = console.options.update(height=lines)
    with console.capture() as captured:
        console.print(LiveScreen(now, Heading("rltrace-runs/x", "12:00:00", 1, is_screen=True), found, ""), end="")
        assert options.max_width == columns
    return captured.get()


def lane(rank: int, phase: str = "actor.update", **changes: object) -> LaneNow:
    known = {
        "name": f"rank {rank}", "rank": rank, "host": "node0", "phase": phase, "phase_seconds": 3 + rank / 1024,
        "last_phase": None, "inside": "fsdp.all_gather", "inside_seconds": 0.01, "silent_seconds": 0.1,
        "state": "running",
    }  # fmt: skip
    return LaneNow(**{**known, **changes})  # type: ignore[arg-type]


def device(rank: int, used_gib: int) -> DeviceNow:
    owners = {"actor.params": 8 << 30, "rollout.kv_cache": 20 << 30}
    return DeviceNow(
        name=f"rank {rank}", rank=rank, host=None, owners=owners, used_bytes=used_gib << 30, capacity_bytes=80 << 30
    )


def many_ranks() -> Now:
    """1,024 ranks, of which one is late, one was killed, one is silent, and one has a fuller GPU than the others."""
    odd = {
        17: lane(17, "weight_sync", phase_seconds=31.0),
        90: lane(90, state="SIGKILL"),
        500: lane(500, silent_seconds=45.0),
        501: lane(501, phase_seconds=40.0),
    }
    stacks = [
        StackNow(process=f"rank {n}", rank=n, pid=n, host="h", thread="t", spans=["step", "x"], seconds=n / 100)
        for n in range(1024)
    ]
    return Now(
        seconds=4000, still_seconds=0.1, lanes=[odd.get(rank, lane(rank)) for rank in range(1024)],
        devices=[device(rank, 79 if rank == 3 else 40) for rank in range(1024)], rollout=None, steps=[], errors=[],
        errors_in_all=0, hosts=[], hosts_elsewhere=[], ranks_started=1024, processes=2049, ended=0,
        losses=Losses(0, 0, 0, 0, 0, 0), stacks=stacks,
    )  # fmt: skip


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 60)])
def test_a_thousand_ranks_are_grouped(columns: int, lines: int) -> None:
    """Ranks that do the same are one row, and those that do not are named, the worst first."""
    screen = drawn(many_ranks(), columns, lines).splitlines()
    assert len(screen) <= lines and all(len(line) <= columns for line in screen)
    rows = screen[screen.index("Ranks") + 1 :]
    assert re.match(r"rank 90 +killed by SIGKILL in actor.update *$", rows[0])
    assert re.match(r"rank 500 +actor.update, silent +45 s", rows[1])
    assert re.match(r"1,021 ranks +actor.update +3.0-40 s +longest: rank 501", rows[2])
    assert re.match(r"rank 17 +weight_sync +31 s", rows[3])
    assert any(re.match(r"fullest: rank 3 +▕a+b+░+·*▏ 79.0 GiB of 80.0 GiB", row) for row in rows)
    assert any(re.match(r"middle: rank \d+ +▕.*▏ 40.0 GiB of 80.0 GiB", row) for row in rows)


def test_findings_are_whole_sentences(tmp_path: Path) -> None:
    """A finding that is wider than the terminal goes on in the next line, and is not cut."""
    run = PlantedRun(tmp_path / "run", ranks=2)
    run.longer["actor.update", 1] = lambda _step: 2.0
    run.gap["actor.old_log_prob"] = 1.0
    why = run.judge()
    screen = drawn(many_ranks(), 80, 60, Findings(why, "12:00:00", "1-8"))
    shown = screen[screen.index("Findings so far") :]
    assert "…" not in shown
    said = " ".join(shown.split())
    assert all(one.title in said for one in why.findings[:2])
    assert max(len(one.title) for one in why.findings[:2]) > 80
