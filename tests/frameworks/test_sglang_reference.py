"""The reference run's engine with a real SGLang on a CPU: its scheduler takes weights in buckets, and proves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from environments import ROOT
from framework_runs import TIMEOUT_SECONDS, result, trace
from test_sglang_cpu import ABSENT, VARIABLES

from rltrace.events import Span

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

# As a worker does it: the engine sleeps, takes the weights in buckets and generates, twice with the same weights. Then:
# log-probs by the embedded engine's model, weights that do not all arrive, an engine that ends, one whose scheduler
# dies, and one whose checkpoint has no weights.
PROGRAM = """
    import json
    import os
    import signal
    from pathlib import Path

    import torch
    from msgspec.structs import replace
    from rltrace.errors import RunError
    from rltrace_reference import architecture, config, device, task
    from rltrace_reference.engine.engine import Engine
    from rltrace_reference.rollout import Rollout
    from rltrace_reference.weight_sync import Sender

    PROMPTS = [[1, 2], [3, 4], [5, 6], [7, 8]]

    def main():
        shape = config.ModelConfig(vocab_size=500, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
        rollout = config.RolloutConfig(engine="sglang", n=3, slots=8, gpu_memory_utilization=0.02, temperature=0.7)
        run = config.Config(ranks=1, device="cpu", model=shape, task=config.TaskConfig(prompts=4), rollout=rollout)
        engine = Rollout(run, 0)
        engine.start()
        torch.manual_seed(0)
        weights = {name: 0.2 * torch.randn(size) for name, size in shape.shapes().items()}
        sender = Sender(engine.channel, run.bucket_bytes, "test", device.transport("shared_memory"))
        places = []
        for step in range(2):
            engine.sleep(2)
            engine.wake_up(["weights"])
            stats = sender.sync(weights, step)
            engine.wake_up(["kv_cache"])
            batch = engine.generate(PROMPTS, 5, step)
            places.append(engine.addresses)
        engine.record(on=False)
        engine.record(on=True)
        print("RESULT " + json.dumps({
            "bytes": stats.bytes, "buckets": stats.buckets, "places": places, "names": sorted(engine.checksums()),
            "tokens": [row[mask].tolist() for row, mask in zip(batch.tokens_BT, batch.response_mask_BT)],
            "off": log_probs_off(run, weights, batch), "short": refusal(sender, weights),
            "end": end(engine), "death": death(run),
            "no_weights": no_weights(run),
        }))

    def log_probs_off(run, weights, batch):
        embedded = Engine(replace(run, rollout=replace(run.rollout, slots=16)), 0, task.EOS)
        embedded.load()
        for name, weight in weights.items():
            embedded.parameters[name].copy_(weight)
        embedded.reserve_kv(1 << 26)
        rows = len(batch.tokens_BT)
        hidden = embedded.model.forward(batch.tokens_BT, torch.zeros(rows, dtype=torch.int64), torch.arange(rows))
        expected = torch.log_softmax(embedded.model.logits(hidden).float() / 0.7, -1)[:, :-1]
        of_tokens = expected.gather(-1, batch.tokens_BT[:, 1:, None])[..., 0]
        off = (of_tokens - batch.engine_log_probs_BT[:, 1:])[batch.response_mask_BT[:, 1:]]
        return off.abs().max().item()

    def refusal(sender, weights):
        try:
            sender.sync(dict(list(weights.items())[:-1]), 2)
        except RunError as error:
            return str(error)

    def end(engine):
        engine.close()
        return engine.process.wait()

    def death(run):
        engine = Rollout(run, 0)
        engine.start()
        children = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children").read_text().split()
        (scheduler,) = [pid for pid in children if "scheduler" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(int(scheduler), signal.SIGKILL)
        try:
            engine.generate(PROMPTS, 5, 2)
        except RunError as error:
            return str(error)

    def no_weights(run):
        architecture.transformers_config(run.model).save_pretrained("nothing")
        try:
            Rollout(run, 0).restart("nothing")
        except RunError as error:
            return str(error)

    if __name__ == "__main__":
        main()
"""


@pytest.fixture(scope="module")
def traced(sglang_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = os.pathsep.join(map(str, (*ABSENT, ROOT / "reference_run")))
    return trace(sglang_environment, tmp_path_factory.mktemp("reference"), PROGRAM, **VARIABLES | {"PYTHONPATH": path})


def test_weights_are_proven_where_sglang_has_them(traced):
    """Every parameter of the checkpoint arrives, in the scheduler's process, and is summed up there."""
    said = result(traced.out)
    assert len(said["names"]) == 2 + 11 * 2 and said["buckets"] > 1
    scheduler = first(traced, "scheduler 0")
    for name in ("weight_sync.load", "weight_sync.verify"):
        buckets = {span.args["bucket"]: span.args["bytes"] for span in scheduler if span.name == name}
        assert [sum(size for key, size in buckets.items() if key.startswith(f"test.{step}.")) for step in (0, 1)] == [
            said["bytes"]
        ] * 2
    assert said["short"] == (
        "weight sync: model.norm.weight (1 of 24 parameters) was never sent whole to the engine of rank 0: 0 of 64 "
        "elements"
    )


def test_its_log_probs_are_the_models(traced):
    """SGLang's log-probs of its own samples are those of the embedded engine's model with the same weights."""
    said = result(traced.out)
    assert all(tokens for tokens in said["tokens"]) and len(said["tokens"]) == 12
    assert said["off"] < 0.05


def test_addresses_are_the_schedulers(traced):
    (before, after) = result(traced.out)["places"]
    assert before == after != ""


def test_it_sleeps_and_wakes_by_tags(traced):
    names = ("rollout.sleep", "rollout.wake_weights", "rollout.wake_kv_cache")
    said = [(span.name, span.args["tags"]) for span in first(traced, "scheduler 0") if span.name in names]
    assert said == list(zip(names, (["kv_cache", "weights"], ["weights"], ["kv_cache"]), strict=True)) * 2


def test_its_processes_are_the_ranks(traced):
    """The engine's process says its rank, and the scheduler below it is of the same."""
    schedulers = [process for process in traced.recording.processes if "scheduler" in process.name]
    assert [process.name for process in schedulers[:2]] == ["rank 0 scheduler 0"] * 2
    starters = {process.key: process for process in traced.recording.processes}
    assert {starters[process.parent].rank for process in schedulers} == {0}


def test_the_scheduler_ends_by_itself(traced):
    """An engine that ends leaves no process that was killed, which would be a run's failure."""
    assert result(traced.out)["end"] == 0
    (ended, killed) = [process for process in traced.recording.processes if process.name.endswith("scheduler 0")][:2]
    assert (ended.killed_by, killed.killed_by) == (None, 9)


@pytest.mark.parametrize(("why", "said"), [("death", "scheduler_0"), ("no_weights", "Cannot find any model weights")])
def test_a_failure_of_the_scheduler_is_told(traced, why, said):
    """The scheduler's own words reach the worker, which has only seen its engine die."""
    told = result(traced.out)[why]
    assert told.startswith("engine of rank 0 ") and said in told and "\n" not in told


def first(traced, name):
    """The spans of the first process of this name, in order."""
    process = next(process for process in traced.recording.processes if process.name.endswith(name))
    return sorted((event for event in process.events() if isinstance(event, Span)), key=lambda span: span.start_ns)
