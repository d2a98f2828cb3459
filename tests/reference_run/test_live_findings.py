"""A fault that is planted into a running example is found, with its rank, its phase and its price."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_runs import QUICK, record

from rltrace.analysis.findings import why
from rltrace.analysis.summary import analyse

SECONDS = 0.5
CLOSE = 0.2

PLANTED = f"""
import time
from wrapt import register_post_import_hook

def plant(module):
    update = module.Actor.update

    def slow_update(actor, batch, step):
        if actor.rank == 1:
            time.sleep({SECONDS})
        return update(actor, batch, step)

    module.Actor.update = slow_update

register_post_import_hook(plant, "rltrace_reference.actor")
"""


def test_rank_that_is_slow_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that takes half a second longer to begin its update is named, although both ranks take as long.

    The other one waits for it in the collectives.
    """
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    judged = why(analyse(record(tmp_path, steps=9, **QUICK)))
    (finding,) = [one for one in judged.findings if one.id == "slow_rank" and "actor.update" in one.evidence.phases]
    assert finding.evidence.ranks == [1] and "rank 1 is slow in actor.update" in finding.title
    assert finding.seconds_per_step == pytest.approx(SECONDS, rel=CLOSE)
    assert judged.critical_path is not None
    (part,) = [one for one in judged.critical_path.parts if one.phase == "actor.update"]
    assert next(iter(part.lanes)) == "rank 1"
    (bound,) = [one for one in judged.critical_path.what_ifs if one.what.startswith("rank 1 ")]
    assert bound.bound_seconds == pytest.approx(SECONDS, rel=2 * CLOSE)
