"""The memory of a training pass is looked at where it turns, as long as all looks together stay cheap."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from warm_python import run_source

from rltrace.events import Turn
from rltrace.hooks.boundaries import Boundary
from rltrace.hooks.hook import Hook
from rltrace.instrument.memory import turns as turns_module
from rltrace.instrument.memory.turns import Turns
from rltrace.instrument.memory.work import Work
from rltrace.instrument.torch import models

SETUP = """
    import json, sys
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from rltrace.hooks.patching import PatchSet
    from rltrace.instrument.memory.cuda_ledger import CudaLedger
    from rltrace.instrument.memory.cuda_memory import name_hooks
    from rltrace.instrument.memory.turns import Turns
    from rltrace.instrument.torch.models import TorchModels
    from rltrace.instrument.memory.work import Work

    class Rows:
        def hook(self, *args): return self
        def fired(self): pass

    class Ledger:
        def __init__(self): self.said = []
        def look(self, turn, activations): self.said.append([turn.value, activations == "actor.activations"])
        def settle(self): self.said.append(["settle", False])
        def say_peak(self): self.said.append(["peak", False])
        def has_moved(self):
            self.said.append(["asked", False])
            return False
        def say_used(self): self.said.append(["used", False])

    looked, patches = Ledger(), PatchSet("test", Rows())
    Turns.BEAT_BURST_NS = Turns.TURN_BEAT_BURST_NS = 0 if sys.argv[2] == "slow" else 10**12
    Turns.BEAT_SHARE = Turns.TURN_BEAT_SHARE = 1e-12
    turns = Turns(looked, Work())
    name_hooks(patches, CudaLedger(lambda: None), turns)
    TorchModels().install(patches)
"""

TRAINING = f"""{SETUP}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    if sys.argv[1] == "fsdp2":
        mesh = init_device_mesh("cpu", (1,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    looked.said.append(["inference", False])
    with torch.no_grad():
        model(torch.ones(4, 8))
    looked.said.append(["move", False])
    model.to(torch.float64)
    torch.cuda.empty_cache()
    try:
        torch.cuda.reset_peak_memory_stats()
    except (AssertionError, AttributeError, RuntimeError):  # there is no GPU
        pass
    if sys.argv[1] == "plain":
        import tempfile
        from transformers import LlamaConfig, LlamaForCausalLM
        sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
        folder = tempfile.mkdtemp()
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
        looked.said.append(["load", False])
        LlamaForCausalLM.from_pretrained(folder)
    print(json.dumps(looked.said))
"""

LONG_CALLS = f"""{SETUP}
    def asked():
        looked.said.append(["asked", bool(optimizer.state)])
        return False

    looked.has_moved = asked
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.ones(4, 8)).sum().backward()
    looked.said.clear()
    optimizer.step()

    lengths = torch.tensor([2, 3])
    looked.said.append(["narrow", False])
    torch.nested.narrow(torch.ones(2, 4, 8), 1, torch.zeros_like(lengths), lengths, layout=torch.jagged)
    looked.said.append(["compiled", False])
    grouped = torch.compile(lambda tensor: torch.optim.Optimizer._group_tensors_by_device_and_dtype([[tensor]]),
                            backend="eager", fullgraph=True)
    assert grouped(torch.ones(1))
    print(json.dumps(looked.said))
"""

OFFLOADED = f"""{SETUP}
    import traceback
    from torch.distributed.fsdp import CPUOffloadPolicy

    def asked():
        looked.said.append(["asked", "_init_sharded_param" in str(traceback.extract_stack())])
        return False

    looked.has_moved = asked
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    looked.said.append(["sharded", False])
    torch.ones(1).cpu()
    assert not torch.overrides._get_current_function_mode_stack()
    print(json.dumps(looked.said))
"""


def told(folder: Path, kind: str, beats: str, text: str = TRAINING) -> list[tuple[str, bool]]:
    """What a real training step tells its ledger, in order."""
    done = run_source("torch", text, folder, kind, beats)
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    return [(name, in_pass) for name, in_pass in json.loads(done.stdout)]


PASS = [("settle", False), ("forward.end", True), ("backward.begin", True), ("backward.end", False)]
STEP = [("optimizer.begin", False), ("optimizer.end", False), ("zero_grad", False)]
LOAD = [("load", False), ("module.moved", False)]
EMPTIED = [("empty_cache", False), ("empty_cache", False), ("peak", False)]
REST = [("inference", False), ("move", False), ("module.moved", False), *EMPTIED]


def test_fsdp2_step(tmp_path: Path) -> None:
    """Every turn of a step of FSDP2 is a look, and an inference is none."""
    assert told(tmp_path, "fsdp2", "slow") == [*PASS, *PASS, *STEP, *REST]


def test_plain_step(tmp_path: Path) -> None:
    """A model that nobody wraps has the same turns, and a look where one is loaded."""
    assert told(tmp_path, "plain", "slow") == [*PASS, *PASS, *STEP, *REST, *LOAD]


def test_long_calls_ask_inside(tmp_path: Path) -> None:
    """An optimizer's first step asks once its states are there, and so does what waits for the GPU; no graph breaks."""
    asked_with_states = ("asked", True)
    assert told(tmp_path, "plain", "fast", LONG_CALLS) == [
        ("optimizer.begin", False), asked_with_states, ("optimizer.end", False),
        ("narrow", False), asked_with_states,
        ("compiled", False),
    ]  # fmt: skip


def test_sharding_asks_before_each_copy_to_the_host(tmp_path: Path) -> None:
    """While an offloaded model is sharded, its shards on the card are seen before they are sent to the host."""
    said = told(tmp_path, "fsdp2", "fast", OFFLOADED)
    assert said[: said.index(("sharded", False))].count(("asked", True)) == 2, "its weight and its bias"
    assert said[-1] == ("sharded", False), "and nothing is watched behind it"


def test_layers_beat(tmp_path: Path) -> None:
    """Each layer's forward, and both ends of each backward, ask whether memory has moved, also without gradients."""
    said = told(tmp_path, "fsdp2", "fast")
    groups = 3  # each layer's; the root has no parameters of its own
    assert said[: said.index(("settle", False))].count(("asked", False)) >= 2 * groups, "while it is sharded"
    inference = said[said.index(("inference", False)) : said.index(("move", False))]
    assert inference.count(("asked", False)) >= 3
    assert said[: said.index(("backward.end", False))].count(("asked", False)) >= 6
    backward = said[said.index(("backward.begin", True)) : said.index(("backward.end", False))]
    assert backward.count(("asked", False)) >= 2 * 3  # where each layer's backward begins and where it ends


class Clocked:
    """A ledger whose looks take a while, on a clock of its own."""

    now_ns = 0
    moved = False
    said = 0
    """How often the total was recorded alone."""

    def __init__(self, look_ns: int) -> None:
        self.look_ns = look_ns
        self.looks: list[tuple[int, Turn]] = []
        self.activations: list[str | None] = []
        self.asked: list[int] = []
        self.peaks = 0

    def look(self, turn: Turn, *, activations: str | None) -> None:
        self.looks.append((self.now_ns, turn))
        self.activations.append(activations)
        self.now_ns += self.look_ns

    def settle(self) -> None:
        """Nothing."""

    def say_peak(self) -> None:
        self.peaks += 1

    def has_moved(self) -> bool:
        self.asked.append(self.now_ns)
        self.now_ns += 80_000
        return self.moved

    def say_used(self) -> None:
        self.said += 1


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    clocked = Clocked(look_ns=500_000)
    monkeypatch.setattr(turns_module, "now_ns", lambda: clocked.now_ns)
    return clocked


def train(turns: Turns, ledger: Clocked, seconds: float, pass_ns: int) -> None:
    until_ns = ledger.now_ns + int(seconds * 1e9)
    while ledger.now_ns < until_ns:
        turns.begin_forward(has_gradients=True)
        ledger.now_ns += pass_ns // 2
        turns.end_forward(has_gradients=True)
        turns.begin_backward()
        ledger.now_ns += pass_ns // 2
        turns.end_backward()


@pytest.mark.parametrize("pass_ns", [1_000_000, 30_000_000, 1_000_000_000])
def test_share(ledger: Clocked, pass_ns: int) -> None:
    """However short the passes are, looks and beats take their shares of the time, and a burst at first."""
    turns = Turns(ledger, Work())
    train(turns, ledger, 100, pass_ns)
    of_looks_ns = len(ledger.looks) * ledger.look_ns
    assert of_looks_ns <= Turns.PASS_BURST_NS + Turns.PASS_SHARE * ledger.now_ns + 3 * ledger.look_ns
    assert of_looks_ns >= min(Turns.PASS_SHARE * ledger.now_ns, 3 * ledger.look_ns * 100e9 / pass_ns) * 0.9
    assert len(ledger.asked) * 80_000 <= Turns.TURN_BEAT_BURST_NS + Turns.TURN_BEAT_SHARE * ledger.now_ns + 80_000


def test_total_is_told_while_looks_are_owed(ledger: Clocked) -> None:
    """Where memory has moved and looks have taken more than their share, the total is recorded alone."""
    turns = Turns(ledger, Work())
    ledger.moved = True
    turns.beat()
    assert [turn for _, turn in ledger.looks] == [Turn.BEAT] and ledger.said == 0
    for _ in range(200):
        turns.reached(Turn.EMPTY_CACHE)
    looks = len(ledger.looks)
    turns.beat()
    assert len(ledger.looks) == looks and ledger.said == 1


def test_long_forwards_do_not_starve_turns(ledger: Clocked) -> None:
    """What beats inside of a forward have spent is not missing where the next one begins."""
    turns = Turns(ledger, Work())
    for _ in range(100):
        turns.beat()
    asked = len(ledger.asked)
    turns.beat()
    assert len(ledger.asked) == asked, "nothing is left"
    turns.begin_forward(has_gradients=False)
    assert len(ledger.asked) == asked + 1


def test_the_beginning_of_a_backward_is_never_missed(ledger: Clocked) -> None:
    """Though beats are owed, the first layers of each backward ask: the gradients of the logits have just come."""
    turns = Turns(ledger, Work())
    for _ in range(3):
        turns.begin_forward(has_gradients=True)
        for _ in range(100):
            turns.beat()
        assert ledger.now_ns < turns.beat_due_ns, "nothing is left"
        turns.end_forward(has_gradients=True)
        turns.begin_backward()
        asked = len(ledger.asked)
        for _ in range(Turns.BACKWARD_BEATS):
            assert ledger.now_ns >= turns.beat_due_ns, "the hooks of layers look at it before they call"
            turns.beat()
        assert len(ledger.asked) == asked + Turns.BACKWARD_BEATS
        assert ledger.now_ns < turns.beat_due_ns
        turns.end_backward()


@pytest.mark.parametrize("moved", [False, True])
def test_beats_follow_what_moves(ledger: Clocked, moved: bool) -> None:
    """Where each beat finds a change there are four times as many, and no more; where none does, a fourth later."""
    turns = Turns(ledger, Work())
    ledger.moved, ledger.look_ns = moved, 0
    while ledger.now_ns < 100e9:
        ledger.now_ns = max(ledger.now_ns + 1_000_000, turns.beat_due_ns)
        turns.beat()
    paid = (Turns.BEAT_BURST_NS + Turns.BEAT_SHARE * ledger.now_ns) / 80_000
    first = Turns.STILL_BEATS
    expected = paid * Turns.FOUND_DISCOUNT if moved else first + (paid - first) / Turns.STILL_PRICE
    assert len(ledger.asked) == pytest.approx(expected, rel=0.02)


def test_beats_are_cheap_again_where_memory_moves(ledger: Clocked) -> None:
    """What has been still for long is asked as often as before once a beat has found a change."""
    turns = Turns(ledger, Work())

    def wait_ns() -> int:
        ledger.now_ns = max(ledger.now_ns, turns.beat_due_ns)
        turns.beat()
        return turns.beat_due_ns - ledger.now_ns

    for _ in range(Turns.STILL_BEATS + 1):
        wait_ns()
    still_ns = wait_ns()
    ledger.moved = True
    wait_ns()
    ledger.moved = False
    assert wait_ns() == pytest.approx(still_ns / Turns.STILL_PRICE, rel=0.01)


class Growing(Clocked):
    """A ledger that grows, until it is asked."""

    has_grown = False

    def __init__(self) -> None:
        super().__init__(look_ns=500_000)

    def has_moved(self) -> bool:
        super().has_moved()
        has_grown, self.has_grown = self.has_grown, False
        return has_grown


def infer(turns: Turns, ledger: Clocked, phase: str) -> None:
    """A phase of eight forwards without gradients."""
    turns.pass_boundary(Boundary((phase,), is_end=False))
    for _ in range(8):
        turns.begin_forward(has_gradients=False)
        ledger.now_ns += 55_000_000
        turns.end_forward(has_gradients=False)
    turns.pass_boundary(Boundary((phase,)))


def test_still_phases_leave_turns_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of decoding, log-probs that move nothing, and an update that grows twice, growth is seen at once.

    Two in five were missed while all turns asked alike: those of the log-probs had spent the budget.
    """
    ledger = Growing()
    monkeypatch.setattr(turns_module, "now_ns", lambda: ledger.now_ns)
    turns = Turns(ledger, Work())
    missed = []
    for step in range(40):
        for _ in range(500):  # the engine decodes
            turns.beat_if_due()
            ledger.now_ns += 6_000_000
        infer(turns, ledger, "actor.old_log_prob")
        infer(turns, ledger, "ref.log_prob")
        turns.pass_boundary(Boundary(("actor.update",), is_end=False))
        for batch in range(8):
            turns.begin_forward(has_gradients=True)
            ledger.has_grown = batch < 2
            ledger.now_ns += 60_000_000
            turns.end_forward(has_gradients=True)
            turns.begin_backward()
            ledger.now_ns += 110_000_000
            turns.end_backward()
            missed += [(step, batch)] * ledger.has_grown
        turns.pass_boundary(Boundary(("actor.update",)))
    assert len(missed) <= 2, missed


def test_a_still_phase_that_moves_is_asked_again(ledger: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is plenty, a still phase is asked once; when that finds a change, its other turns ask too."""
    monkeypatch.setattr(Turns, "PLENTY", 2)
    monkeypatch.setattr(Turns, "TURN_BEAT_BURST_NS", 10**12)
    turns = Turns(ledger, Work())
    asked = []
    for step in range(Turns.STILL_PHASES + 3):
        ledger.moved = step == Turns.STILL_PHASES + 1
        before = len(ledger.asked)
        infer(turns, ledger, "ref.log_prob")
        asked.append(len(ledger.asked) - before)
    assert asked == [7] * Turns.STILL_PHASES + [1, 16, 7]


def test_what_interrupts_a_beat_is_not_owed(ledger: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a garbage collection inside of a beat and of a look, the next ones come as soon as after slow ones."""
    turns = Turns(ledger, Work())
    ledger.look_ns = 500_000_000
    turns.reached(Turn.EMPTY_CACHE)
    ledger.now_ns += int(Turns.MOST_LOOK_NS / Turns.SHARE)
    turns.reached(Turn.EMPTY_CACHE)
    assert len(ledger.looks) == 2
    monkeypatch.setattr(Turns, "BEAT_BURST_NS", 0)
    asks = ledger.has_moved

    def interrupted() -> bool:
        ledger.now_ns += 500_000_000
        return asks()

    monkeypatch.setattr(ledger, "has_moved", interrupted)
    turns.beat()
    assert turns.beat_due_ns - ledger.now_ns <= Turns.MOST_BEAT_NS / Turns.BEAT_SHARE


def test_whole_passes(ledger: Clocked) -> None:
    """A pass is looked at as a whole or not at all."""
    train(Turns(ledger, Work()), ledger, 20, 10_000_000)
    looked = [turn for _, turn in ledger.looks]
    whole = [Turn.FORWARD_END, Turn.BACKWARD_BEGIN, Turn.BACKWARD_END]
    assert looked == whole * (len(looked) // 3)
    assert len(looked) < 20_000_000_000 / 10_000_000


def test_activations_of_a_beat_end(ledger: Clocked) -> None:
    """Where a beat saw activations, in a pass that is left out or in an inference, its end is looked at too."""
    turns = Turns(ledger, Work())
    ledger.moved = True
    turns.begin_forward(has_gradients=False)
    ledger.moved = False
    turns.end_forward(has_gradients=False)
    turns.begin_forward(has_gradients=False)
    turns.end_forward(has_gradients=False)
    assert [turn for _, turn in ledger.looks] == [Turn.BEAT, Turn.FORWARD_END]


def test_rare_places(ledger: Clocked) -> None:
    """An optimizer's step is looked at though passes have spent all that looks may take."""
    turns = Turns(ledger, Work())
    train(turns, ledger, 0.3, 10_000_000)
    looks = len(ledger.looks)
    train(turns, ledger, 0.01, 10_000_000)
    assert len(ledger.looks) == looks, "nothing is left"
    turns.reached(Turn.OPTIMIZER_BEGIN)
    turns.reached(Turn.OPTIMIZER_END)
    assert len(ledger.looks) == looks + 2


def test_peak_of_backwards_is_told(ledger: Clocked) -> None:
    """Where no look is left, torch's own count is told before an optimizer takes more, and before it is reset."""
    turns = Turns(ledger, Work())
    for _ in range(200):
        turns.reached(Turn.EMPTY_CACHE)
    train(turns, ledger, 0.02, 10_000_000)
    assert ledger.peaks == 0
    turns.reached(Turn.OPTIMIZER_BEGIN)
    turns.reached(Turn.OPTIMIZER_END)
    assert ledger.peaks == 1
    turns.before_reset()
    assert ledger.peaks == 2


def test_rare_places_do_not_starve_passes(ledger: Clocked) -> None:
    """Passes are looked at though an engine's `empty_cache` has spent all that other looks may take."""
    turns = Turns(ledger, Work())
    for _ in range(200):
        turns.reached(Turn.EMPTY_CACHE)
    train(turns, ledger, 0.02, 10_000_000)
    assert [turn for _, turn in ledger.looks[-3:]] == [Turn.FORWARD_END, Turn.BACKWARD_BEGIN, Turn.BACKWARD_END]
    assert (
        len([turn for _, turn in ledger.looks if turn is Turn.EMPTY_CACHE]) <= 2 * Turns.BURST_NS // ledger.look_ns + 1
    )


def test_forward_without_a_backward(ledger: Clocked) -> None:
    """A forward with gradients that no backward follows ends at the optimizer's step at the latest."""
    turns = Turns(ledger, Work())
    turns.begin_forward(has_gradients=True)
    turns.end_forward(has_gradients=True)
    turns.reached(Turn.OPTIMIZER_BEGIN)
    assert ledger.activations == ["actor.activations", None]


def test_passes_of_who_is_worked_for(ledger: Clocked) -> None:
    """What a pass leaves belongs to the one who is worked for as it is looked at; a ref's would be the actor's."""
    work = Work()
    turns = Turns(ledger, work)
    for subject in ("critic", "ref", None):
        before = work.begin(subject)
        turns.begin_backward()
        turns.end_backward()
        work.end(before)
    owners = [owner for owner in ledger.activations if owner is not None]
    assert owners == ["critic.activations", "actor.activations", "actor.activations"]


def test_known_module_without_parameters_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module without parameters is asked for them once; what it calls is no model either."""
    asked: list[str] = []
    begin = models.begin_forward

    def counting(module: Any, *rest: Any) -> Any:
        asked.append(type(module).__name__)
        return begin(module, *rest)

    monkeypatch.setattr(models, "begin_forward", counting)
    hook = Hook("torch_models", "torch:nn.Module.__call__")
    hook.bind(True)
    monkeypatch.setattr(torch.nn.Module, "__call__", models.wrap_call(torch.nn.Module.__call__, hook))
    sampler, model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmax(-1)), torch.nn.Linear(2, 2)
    for _ in range(3):
        sampler(model(torch.ones(1, 2)))
    assert asked == ["Linear", "Sequential", "Linear", "Linear"]
    assert hook.failures == 0 and not models.INSIDE.model


def test_first_forwards_are_watched_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model's first forwards watchers are told of each module, later of the model alone."""
    told: list[str] = []
    watcher = SimpleNamespace(
        meet=lambda _model: None,
        begin_forward=lambda: told.append("model"),
        end_forward=lambda _token: None,
        inside_forward=lambda: told.append("module"),
    )
    monkeypatch.setattr(models, "FORWARD_WATCHERS", [watcher])
    monkeypatch.setattr(models, "FIRST", models.First())
    hook = Hook("torch_models", "torch:nn.Module.__call__")
    hook.bind(True)
    monkeypatch.setattr(torch.nn.Module, "__call__", models.wrap_call(torch.nn.Module.__call__, hook))
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for gradients in (False, True):
        for number in range(models.FIRST_FORWARDS + 2):
            with torch.set_grad_enabled(gradients):
                layers(torch.ones(1, 2))
            assert told == ["model", *(["module"] * 2 if number < models.FIRST_FORWARDS else [])], number
            told.clear()
    assert hook.failures == 0
