"""`python -m rltrace_reference.compare_sync CONFIG.yaml` syncs the same weights in several ways and prints a table."""

from __future__ import annotations

import argparse
import statistics
import sys
import uuid

from rich.console import Console
from rich.table import Table

from rltrace.errors import RltraceError, RunError
from rltrace_reference.__main__ import checked
from rltrace_reference.config import Config
from rltrace_reference.strategy import alternatives
from rltrace_reference.weight_sync import SyncStats
from rltrace_reference.worker_group import WorkerGroup

FIGURES = ("first ms", "median ms", "slowest ms", "GB/s", "pieces", "checksums")


def main(arguments: list[str] | None = None) -> int:
    """Compare, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rltrace_reference.compare_sync", description=__doc__)
    parser.add_argument("config", help="YAML file; its model, ranks and bucket size are used")
    parser.add_argument("--rounds", type=int, default=6, help="syncs in each way; the first is shown apart")
    parser.add_argument(
        "--force", action="store_true", help="try untested versions of vLLM and SGLang, and GPUs others use too"
    )
    options = parser.parse_args(arguments)
    table = Table("way", *FIGURES, box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    try:
        compare(checked(options.config, options.force), options.rounds, table)
    except RltraceError as error:
        print(f"rltrace: {error}", file=sys.stderr)
        return error.exit_code
    finally:  # one way may take longer than anybody waits: what the others took is known
        if table.rows:
            Console(width=140).print(table)
    return 0


def compare(config: Config, rounds: int, table: Table) -> None:
    """Start the run's processes and sync in every way.

    Args:
        config: The run.
        rounds: Syncs in each way, at least 2.
        table: Gets a row for each way.
    """
    transports = ["shared_memory"] if config.device == "cpu" else ["cuda_ipc", "host_staging"]
    with WorkerGroup(config, run_id=uuid.uuid4().hex[:8]) as workers:
        for strategy in alternatives(transports, config.rollout.bucket_megabytes):
            if strategy.least_ranks > config.ranks:
                table.add_row(str(strategy), f"unrun: needs {strategy.least_ranks} ranks", *[""] * (len(FIGURES) - 1))
                continue
            count = 2 if strategy.restarts_engine else rounds  # starting vLLM takes half a minute
            try:
                of_ranks = workers.call("compare_sync", [(strategy, count)] * config.ranks)
            except RunError as error:
                if strategy.transport != "nccl":
                    raise
                table.add_row(str(strategy), "refused", *[""] * (len(FIGURES) - 1))
                table.caption = f"nccl: {error}"
                continue
            figures = _figures(of_ranks)
            table.add_row(str(strategy), *figures)
            print(f"{strategy}: {figures[1]} ms", file=sys.stderr, flush=True)


def _figures(of_ranks: list[list[SyncStats]]) -> list[str]:
    """Return a row: a round is as slow as its slowest rank."""
    first, *rest = (max(stats.seconds for stats in of_round) for of_round in zip(*of_ranks, strict=True))
    stats, median = of_ranks[0][0], statistics.median(rest)
    gigabytes_per_second = stats.bytes / median / 1e9
    return [
        f"{1e3 * first:.1f}",
        f"{1e3 * median:.1f}",
        f"{1e3 * max(rest):.1f}",
        f"{gigabytes_per_second:.0f}" if gigabytes_per_second >= 10 else f"{gigabytes_per_second:.2g}",
        str(stats.buckets),
        f"{stats.tensors} of {stats.tensors}",  # of a sync with one that differs there is no figure
    ]


if __name__ == "__main__":
    sys.exit(main())
