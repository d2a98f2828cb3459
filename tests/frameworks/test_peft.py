"""A loop that trains LoRA adapters with the real peft, and whose reference policy is the model without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_runs import TIMEOUT_SECONDS, trace

from rltrace.analysis.summary import summarize
from rltrace.events import Span

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

LOOP = """
import torch
from peft import LoraConfig, get_peft_model


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)

    def forward(self, rows):
        for _ in range(8):
            rows = self.second(self.first(rows).relu())
        return rows


model = get_peft_model(Scores(), LoraConfig(r=4, target_modules=["first"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
rows = torch.randn(512, 512)
for step in range(4):
    with torch.no_grad():
        old = model(rows)
        with model.disable_adapter():
            ref = model(rows)
            with model.disable_adapter():  # as a function that is called there may do again
                assert torch.equal(model(rows), ref)
            assert torch.equal(model(rows), ref)
        again = model(rows)
    assert torch.equal(old, again) and (step == 0 or not torch.equal(old, ref))
    try:
        with torch.no_grad(), model.disable_adapter():
            raise KeyError
    except KeyError:
        pass
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_reference_without_adapters(trl_environment: Path, tmp_path: Path) -> None:
    """Forwards with the adapters off are the reference's, and those before and behind them the actor's."""
    recording = trace(trl_environment, tmp_path, LOOP).recording
    found = summarize(recording)
    assert [step.inferred for step in found.steps] == [True] * 4
    (process,) = [
        process for process in recording.processes if any(e.name == "model.forward" for e in process.events())
    ]
    spans = sorted((event for event in process.events() if isinstance(event, Span)), key=lambda span: span.start_ns)
    off = [span.args.get("without_adapters", False) for span in spans if span.name == "model.forward"]
    assert off == [False, True, True, True, False, False] * 4
    phases = [span.name for span in spans if span.args.get("inferred") and span.name != "step"]
    assert phases == ["actor.old_log_prob", "ref.log_prob", "actor.old_log_prob", "actor.update"] * 4
