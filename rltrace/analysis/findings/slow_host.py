"""All ranks of one host make the others wait, always of the same one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.findings.slow_rank import FEWEST_RANKS_OF_A_HOST, Slowness, slow_host_of, slowness_of

NAME = "slow_host"

SETTINGS = (
    Setting("your cluster", "compare this host's processors, clocks, cooling, PCIe and network with the others'"),
    Setting("your cluster", "another node in its place"),
)


def judge(run: Run) -> list[Finding]:
    """Price in each phase how far the median rank of a host is behind that of the other hosts."""
    hosts = [lane.host for lane in run.ranks]
    if len(set(hosts)) < 2:
        raise UnjudgeableError("all ranks are on one host")
    if min(hosts.count(host) for host in hosts) < FEWEST_RANKS_OF_A_HOST:
        raise UnjudgeableError(f"a host has fewer than {FEWEST_RANKS_OF_A_HOST} ranks, so it is judged as ranks")
    if not len(run.steps):
        return []
    run.require_one_time()
    return [found for name, slow in slowness_of(run).items() for found in _of_phase(run, name, slow)]


def _of_phase(run: Run, name: str, slow: Slowness) -> Iterator[Finding]:
    host = slow_host_of(run, slow)
    if host is None:
        return
    worst = int(host.behind.argmax())
    ranks = [lane.rank for lane in host.lanes if lane.rank is not None]
    seconds = as_text(host.behind.mean())
    how = f"its ranks are done {seconds} after the others"
    if slow.waited is not None:
        how = f"the others wait {seconds} for its ranks"
    lateness = [float(slow.late[slow.lanes.index(lane)].mean()) for lane in host.lanes]
    yield run.finding(
        NAME,
        f"Host {host.host} is slow in {name} in {host.times} of {len(run.steps)} steps: {how}",
        [
            f"its {len(ranks)} ranks together: the median one is compared with that of each other host",
            f"they begin {as_text(float(np.median(lateness)))} late, and the rest is in the phase",
        ],
        per_step=host.behind,
        less_because="with this host as fast as the others, the slowest rank of the others is waited for",
        basis="measured" if slow.waited is None else "modelled",
        figures={"late_seconds": float(np.median(lateness))},
        ranks=ranks,
        phases=[name],
        settings=SETTINGS,
        moment=run.moment(worst, ranks[0] if ranks else None),
    )
