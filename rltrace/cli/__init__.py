"""The command line: one file per command. Only here do errors become exit codes.

In: a command's arguments. Out: what it prints, and its exit code. `tables/` has what rich prints; `as_json.py` and
`echo.py` are the other ways to the terminal. `runs.py` finds the Recording that a command reads, and `selection.py` has
the options that choose a part of it. `completion.py` is what a shell completes.

To add a command, write a file like `ls.py`, and name it in `PURPOSES` below.

Exit codes: 0 done; 1 an error without a code of its own; 2 wrong usage or configuration; 3 no such Recording; 4 the run
failed; 5 the timeline cannot be shown; 6 a package is missing; 7 the output cannot be written; 8 the doctor found that
something would be missing; 9 the doctor cannot tell; 10 a limit of `check` is broken; 11 the Recording lacks a figure
that has one; 130 interrupted; 141 nobody reads the output.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from rltrace.cli.check import check
from rltrace.cli.collect import collect
from rltrace.cli.diff import diff
from rltrace.cli.doctor import doctor
from rltrace.cli.echo import echo
from rltrace.cli.exec import exec_
from rltrace.cli.export import export
from rltrace.cli.ls import ls
from rltrace.cli.numpy_alone import behind_numpy
from rltrace.cli.overhead import overhead
from rltrace.cli.plan import plan
from rltrace.cli.report import report
from rltrace.cli.run import run
from rltrace.cli.runs import drop_output
from rltrace.cli.sql import sql
from rltrace.cli.summary import summary
from rltrace.cli.view import view
from rltrace.cli.why import why
from rltrace.errors import OutputError, RltraceError
from rltrace.record.announcement import complain

DEBUG_VARIABLE = "RLTRACE_DEBUG"
"""Environment variable that shows the traceback of an error that otherwise is one line."""

INTERRUPTED = 130
BROKEN_PIPE = 141


class Commands(click.Group):
    """A group whose errors are one line on stderr and an exit code, and whose help lists the commands by purpose."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each purpose, with its commands in the order in which they are used."""
        width = max(map(len, self.commands))
        for purpose, commands in PURPOSES.items():
            with formatter.section(purpose):
                about = formatter.width - width - 6  # indent, and what is between the columns
                formatter.write_dl([(f"{one.name:<{width}}", one.get_short_help_str(about)) for one in commands])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; in standalone mode, exit with its code."""

        def invoke() -> Any:
            return super(Commands, self).main(args, prog_name, complete_var, standalone_mode=False, **extra)

        if not standalone_mode:
            return invoke()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal without our bars still has our figures
                stream.reconfigure(errors="replace")
        code = _exit_code(invoke)
        drop_output()
        return sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click would return 1 for a pipe that was closed."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `rltrace summary | head`
            return _drop_output()


VERSION_HELP = "Show the version, what decodes segments, and what is installed of each extra."


def _show_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        from importlib import metadata

        from rltrace import extras
        from rltrace.read import native  # it takes numpy

        echo(f"rltrace, version {metadata.version(extras.DISTRIBUTION)}")
        echo(f"segments are decoded {native.decoder()}", *extras.lines())
        context.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, callback=_show_version, expose_value=False, is_eager=True, help=VERSION_HELP)
def main() -> None:
    """Where every second and every byte of a colocated RL step went.

    Record a program with `rltrace exec -- python train.py`, then look: `rltrace summary` in figures, `rltrace view` as
    a timeline. RUN is the folder of a Recording or an archive of it, by default the newest in ./rltrace-runs.
    """


PURPOSES = {
    "Run": (exec_, run, doctor, plan),
    "See": (summary, why, view, report, ls),
    "Compare": (diff, check, overhead),
    "Data": (sql, export, collect),
}
"""The commands by purpose, as the help lists them."""

COMPUTE = (plan, summary, why, view, report, diff, check, overhead, sql, export)
"""Commands that need numpy."""

for command in itertools.chain.from_iterable(PURPOSES.values()):
    main.add_command(command)
for command in COMPUTE:
    assert command.callback is not None
    command.callback = behind_numpy(command.callback)


def _exit_code(invoke: Callable[[], Any]) -> int:
    try:
        code = invoke()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except RltraceError as error:
        return _fail(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        return _fail(_usage(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # of what was still to be flushed
        return _drop_output()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        drop_output()
        return _fail(f"{error.filename or 'standard output'}: {error.strerror}; write elsewhere", OutputError.exit_code)


def _drop_output() -> int:
    """Drop the output, and return the code of a closed pipe."""
    drop_output()
    return BROKEN_PIPE


def _fail(message: str, code: int) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        raise  # noqa: PLE0704 - called while the error is handled
    complain(" ".join(message.split()))
    return code


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    hint = f"; see `{context.command_path} --help`" if context is not None else ""
    return error.format_message().rstrip(".") + hint
