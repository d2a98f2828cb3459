"""What the terminal shows while a run goes on."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rltrace_reference.step_record import StepRecord

PHASE_OF_CALL = {
    "pids": "starting",
    "setup": "actor.build",
    "generate": "rollout",
    "old_log_prob": "actor.old_log_prob",
    "ref_log_prob": "ref.log_prob",
    "update": "actor.update",
    "close": "ending",
}


class Display:
    """Step, phase, reward and tokens/s: one live line on a terminal, a plain line a step elsewhere."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self.bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description:<19} {task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("starting", total=steps, figures="")

    def phase(self, name: str) -> None:
        """Show what goes on now, by the name of a phase or of a worker's method."""
        self.bar.update(self.task, description=PHASE_OF_CALL.get(name, name))

    def step(self, record: StepRecord) -> None:
        """Show the figures of a finished step."""
        figures = f"reward {record.reward_mean:.3f}  {record.tokens_per_second:,.0f} tokens/s"
        self.bar.update(self.task, advance=1, figures=figures)
        if not self.console.is_terminal:
            self.console.print(f"step {record.step:3}  {figures}  {record.seconds:.2f} s", highlight=False)

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
