"""verl's hooks on the real wheels of six releases: bound, called through verl's own code, and taken back.

What runs without a GPU runs to its end: dispatch through a real Ray worker group, the timer, reward and advantage,
offloading, an update of the releases without an engine, the sharding manager and both its successors, buckets over
verl's own sockets and shared memory. The rest is entered on a bare object, and must raise what it raises without us.
"""

import ast
import functools
import itertools
import json
import os
from pathlib import Path

import pytest
from verl_release import CACHE, HERE, RELEASES, SETTINGS, environment
from warm_python import Warm

import rltrace
from rltrace.events import Span
from rltrace.instrument.verl.hook_points import HOOK_POINTS
from rltrace.read.recording import Recording
from rltrace.record import allocation_steps, manifest

ROOT = Path(rltrace.__file__).parents[1]
STARTUP = ROOT / "rltrace" / "hooks" / "startup"

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]
every_release = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)

DRIVER = {"__init__", "_timer", "compute_advantage"}
OFFLOAD = {
    "load_fsdp_model_to_gpu",
    "load_fsdp_optimizer",
    "offload_fsdp_model_to_cpu",
    "offload_fsdp_optimizer",
}
UPDATE = {"update_policy", "_forward_micro_batch", "logprobs_from_logits", "_optimizer_step"}
UPDATE |= {"compute_values", "update_critic", "compute_value_loss"}
BUCKETS = {"_init_socket", "_init_buffer", "receive_weights", "update_weights", "_cleanup", "resume", "release"}

ENGINE = {"forward_backward_batch", "forward_step", "get_per_tensor_param"}
PARTS = {"prepare_model_inputs", "prepare_model_outputs", "ppo_loss"}
PHASES = {"compute_log_prob", "compute_ref_log_prob", "update_actor"}
CONVERSION = {"to_tensordict", "left_right_2_no_padding", "no_padding_2_padding", "from_tensordict"}
LATEST = DRIVER | OFFLOAD | BUCKETS | ENGINE | PARTS | PHASES
LATEST |= {"infer_batch", "extract_reward", "_call_tool", "sleep", "wake_up"}

ON_SGLANG = {"sgl_update_weights", "update_weights_from_tensor"}
SINCE_8 = {"distillation_ppo_loss", "load_lora_adapter_from_tensor", "train_mini_batch", "compute_value_loss"}
FINISHED = {
    4: DRIVER | OFFLOAD | UPDATE | {"compute_reward", "__enter__", "__exit__", "full_tensor"},
    5: DRIVER | OFFLOAD | UPDATE | {"compute_reward", "__enter__", "__exit__", "full_tensor", "_call_tool"},
    6: DRIVER
    | OFFLOAD
    | UPDATE
    | {"compute_reward", "_call_tool", "rollout_mode", "trainer_mode", "resume", "update_weights", "release"}
    | ON_SGLANG,
    7: LATEST | UPDATE | ON_SGLANG,
    8: LATEST | ON_SGLANG | SINCE_8,
    9: LATEST | ON_SGLANG | SINCE_8 | CONVERSION,
}
"""Functions that verl's own code runs to their end, by the line of releases."""


def lies_in(span, mark):
    """Whether a span begins within another one."""
    return span is not mark and mark.start_ns <= span.start_ns < mark.end_ns


class Exercised:
    """What `exercise_hooks.py` found out about one release, and what it recorded."""

    def __init__(self, found, folder):
        self.found = found
        self.chosen = [said for line in allocation_steps.lines(folder) if "step" in (said := json.loads(line))]
        """What the driver said of the chosen step."""
        (process,) = Recording.open(folder).processes
        events = [event for event in process.events() if isinstance(event, Span)]
        spans = sorted(events, key=lambda span: span.start_ns)
        marks = [span for span in spans if span.name in ("switch to SGLang", "adapter for SGLang")]
        on_sglang = {mark.name: [span for span in spans if lies_in(span, mark)] for mark in marks}
        self.switch_to_sglang = on_sglang.get("switch to SGLang", [])
        self.adapter_for_sglang = on_sglang.get("adapter for SGLang", [])
        self.spans = [span for span in spans if span not in (*marks, *itertools.chain(*on_sglang.values()))]

    def named(self, name):
        """Spans of one name that verl's code ended without an error."""
        return [span for span in self.spans if span.name == name and "error" not in span.args]


def said_by(done):
    """What a program printed that came to its end, with no hook that fails."""
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rltrace: the hook" not in done.stderr
    return done.stdout


@functools.cache
def with_dependencies(folders):
    """A Python that has imported what verl imports of these folders, which releases share."""
    path = os.pathsep.join(map(str, (*folders, HERE)))
    return Warm("dependencies", {**os.environ, **SETTINGS, "PYTHONPATH": path})


def forked_output(scratch, release, program, *words, recording=None):
    """What a program of this folder prints, forked from a Python that has what the release's dependencies are.

    The start-up hook has it join a Recording, if one is named.
    """
    python = with_dependencies(tuple(release.folders[1:]))
    variables = environment(release, scratch, ROOT)
    if recording:
        path = f"{STARTUP}{os.pathsep}{variables['PYTHONPATH']}"
        variables |= {"PYTHONPATH": path, "RLTRACE_DIR": str(recording)}
    return said_by(python.run(HERE / program, variables, scratch, timeout_s=600, words=words))


@pytest.fixture(scope="module")
def exercised(tmp_path_factory):
    """Exercises a release, once."""

    @functools.cache
    def exercise(release):
        scratch = tmp_path_factory.mktemp(release.version)
        folder = scratch / "recording"
        out = forked_output(scratch, release, "exercise_hooks.py", str(folder))
        return Exercised(json.loads(out), folder)

    return exercise


def targets_of(release):
    """Places that the table names for a release: verl's own, and those of vLLM, which is not here."""
    named = {point.target for point in HOOK_POINTS if point.is_in(release.line)}
    of_vllm = {target for target in named if target.startswith("vllm.")}
    return named - of_vllm, of_vllm


@every_release
def test_every_hook_point_is_bound(release, exercised):
    found = exercised(release).found
    own, of_vllm = targets_of(release)
    assert found["failures"] == {}
    assert set(found["in_place"]) == own
    assert set(found["states"]) == own | of_vllm | (LOOPS if release.line >= 5 else set())
    assert {target: found["states"][target][0] for target in of_vllm} == dict.fromkeys(of_vllm, "skipped")


@every_release
def test_a_hook_has_the_face_of_what_it_wraps(release, exercised):
    faces = exercised(release).found["faces"]
    assert {target: pair for target, pair in faces.items() if pair[0] != pair[1]} == {}
    assert sum(pair[0]["registered"] != "None" for pair in faces.values()) >= 3  # verl's `@register` is still there


@every_release
def test_verls_code_runs_under_the_hooks(release, exercised):
    """verl's own code runs to its end under the hooks."""
    found = exercised(release).found
    assert found["errors"] == {}
    called = {target.rpartition(".")[2].rpartition(":")[2] for target in found["called"]}
    assert called >= FINISHED[release.line]


@every_release
def test_hooked_functions_raise_the_same(release, exercised):
    """The other hooked functions raise what they raise without hooks."""
    found = exercised(release).found
    differing = {target: pair for target, pair in found["raised"].items() if pair[0] != pair[1]}
    assert differing == {}
    assert set(found["called"]) | set(found["raised"]) >= set(found["in_place"])
    # The maker of callables and the opening of a socket count a call, not their own.
    silent = {target for target in found["raised"] if target not in found["fired"]}
    assert {target.rpartition(":")[2] for target in silent} <= {
        "func_generator",
        "BucketedWeightSender._init_socket",
        "BucketedWeightReceiver.receive_weights",
    }


@every_release
def test_undoing_puts_every_attribute_back(release, exercised):
    found = exercised(release).found
    assert found["left"] == []
    assert set(found["restored"]) == set(found["in_place"])
    assert found["inert"] == {target: pair[0] for target, pair in found["raised"].items()}
    assert found["fired_after_undo"] == {}


LOOPS = {
    "custom_loops:OwnLoop.run",
    "custom_loops:AskingTwice.run",
    "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop.run",
}
"""Hooked once a worker has made such a loop."""


@pytest.mark.parametrize("release", [r for r in RELEASES if r.line >= 5], ids=lambda release: release.version)
def test_each_agent_loop_is_one_span(release, exercised):
    """Each agent loop of a configuration is one span, also that of the user's own class.

    It is one span even where its `run` calls that of verl's class, hooked before or not.
    """
    run = exercised(release)
    asked = run.named("agent loop of a configuration")
    inside = [[loop.args["loop"] for loop in run.named("agent_loop.run") if lies_in(loop, mark)] for mark in asked]
    assert inside == [["OwnLoop"], ["AskingTwice"], ["SingleTurnAgentLoop"], ["AskingTwice"]]
    assert len(run.named("agent_loop.run")) == 4


@pytest.mark.parametrize("release", [r for r in RELEASES if r.line >= 7], ids=lambda release: release.version)
def test_tools_name_their_trajectory(release, exercised):
    """Two tools at a time run in tasks of their own; a tool outside of any trajectory names none."""
    run = exercised(release)
    own, *others = run.named("agent_loop.trajectory")
    outside, *tools = run.named("agent_loop.tool_call")
    assert "trajectory" not in outside.args
    assert [tool.args["trajectory"] for tool in tools] == [own.args["trajectory"]] * 2
    assert len({tool.task for tool in tools} | {own.task}) == 3
    assert len({trajectory.args["trajectory"] for trajectory in (own, *others)}) == 4


def outcome_of(target, found, of_vllm):
    """What became of a place in a release, in a few words."""
    if target in found["called"]:
        return "called to its end"
    if target in found["raised"]:
        return f"entered, and raises as without us: {(found['raised'][target][0] or 'nothing').splitlines()[0][:80]}"
    return "vLLM's, not here" if target in of_vllm else "not applicable"


@every_release
def test_every_place_of_the_table_has_an_outcome(release, exercised):
    """`make test-verl` shows what this prints: each place that any release has, and what became of it in this one."""
    found = exercised(release).found
    own, of_vllm = targets_of(release)
    outcomes = {point.target: outcome_of(point.target, found, of_vllm) for point in HOOK_POINTS}
    for target in sorted(outcomes):
        print(f"{release.version}  {target}  {outcomes[target]}")
    assert {target for target, outcome in outcomes.items() if outcome != "not applicable"} == own | of_vllm


@every_release
def test_driver_has_step_reward_and_advantage(release, exercised):
    """The driver has its step, its reward and its advantage."""
    run = exercised(release)
    (step,) = run.named("step")  # and no span for verl's other timers
    assert step.args == {"step": 7}
    assert [(said["step"], said["is_over"]) for said in run.chosen] == [(7, False), (7, True)]
    (reward,) = run.named("reward")
    assert reward.args["reward_mean"] == 0.5
    assert [span.args["tokens"] for span in run.named("advantage")] == [9]


@every_release
def test_what_moves_to_the_host_says_its_bytes(release, exercised):
    run = exercised(release)
    parameters = (4 * 8 + 8 + 8 * 4 + 4) * 4
    moved = [(span.args["what"], span.args["bytes"]) for span in run.named("offload.d2h") if span.args["bytes"]]
    states = ("optimizer", 2 * parameters + 4 * 4)  # two moments, and four step counts
    assert moved == [("model", parameters), states, states]  # the optimizer by place, then by name
    back = [(span.args["what"], span.args["bytes"]) for span in run.named("offload.h2d") if span.args["bytes"]]
    assert back[:3] == moved  # a release's engine may load its own model later on


@every_release
def test_an_update_is_divided_into_micro_batches(release, exercised):
    micro_batches = exercised(release).named("actor.micro_batch")
    # By the actor of the older releases, by the engine (0.7 has both), and two of distillation.
    updates = (release.line <= 7) + (release.line >= 7) + 2 * (release.line >= 8)
    assert len(micro_batches) == 2 * updates  # and none for the micro-batches of log-probs
    assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(micro_batches))


@pytest.mark.parametrize("release", [r for r in RELEASES if r.line <= 6], ids=lambda release: release.version)
def test_gathered_parameters_have_bytes(release, exercised):
    """Every parameter that a sharding manager gathers has its bytes."""
    run = exercised(release)
    gathered = [span.args["bytes"] for span in run.named("weight_sync.gather") if "bytes" in span.args]
    assert gathered == [128, 32, 128, 16]
    if release.line == 6:
        assert switch_of(run) == PHASES_OF_A_SWITCH


PHASES_OF_A_SWITCH = ["weight_sync", "rollout.wake_weights", "weight_sync", "rollout.wake_kv_cache", "weight_sync"]

buckets_in = pytest.mark.parametrize("release", [r for r in RELEASES if r.line >= 7], ids=lambda r: r.version)


def switch_of(run):
    """Phases of the first switch to the rollout, in order; none begins before the last has ended."""
    names = {"weight_sync", "rollout.wake_weights", "rollout.wake_kv_cache"}
    phases = [span for span in run.spans if span.name in names and "error" not in span.args][:5]
    assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(phases))
    return [span.name for span in phases]


@buckets_in
def test_phases_have_their_usual_names(release, exercised):
    """The phases of a rank have the names that they have in every Recording."""
    run = exercised(release)
    names = ("actor.old_log_prob", "ref.log_prob", "actor.update")
    phases = [(span.name, span.args) for span in run.spans if span.name in names and "error" not in span.args]
    # The second is the actor without its adapter, which is what a reference is then.
    assert [name for name, _ in phases] == ["actor.old_log_prob", "ref.log_prob", "ref.log_prob", "actor.update"]
    assert all(args == {"sequences": 4} for _, args in phases)
    (update,) = run.named("actor.update")
    inside = [s for s in run.named("actor.micro_batch") if update.start_ns <= s.start_ns and s.end_ns <= update.end_ns]
    assert len(inside) == 2


@every_release
def test_critic_has_phases_of_its_own(release, exercised):
    """A critic's values and its update are phases of their own."""
    run = exercised(release)
    phases = [
        span for span in run.spans if span.name in ("critic.values", "critic.update") and "error" not in span.args
    ]
    # By the worker of the older releases, by the engine's, of which 0.7's loss cannot take the values. What was called
    # on a bare object ended in an error.
    names = ["critic.values", "critic.update"] * (release.line <= 7) + ["critic.values"] * (release.line >= 7)
    assert [span.name for span in phases] == names + ["critic.update"] * (release.line >= 8)
    assert all(span.args == {"sequences": 4} for span in phases)
    assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(phases))
    (update,) = [span for span in phases if span.name == "critic.update"]
    of_critic = [span for span in run.named("critic.micro_batch") if lies_in(span, update)]
    assert len(of_critic) == len(run.named("critic.micro_batch")) == 2
    assert [len([s for s in run.named("micro_batch.loss") if lies_in(s, batch)]) for batch in of_critic] == [1, 1]
    of_actor = ("actor.old_log_prob", "actor.update", "actor.micro_batch", "micro_batch.log_probs")
    assert not [span for span in run.spans if span.name in of_actor and any(lies_in(span, phase) for phase in phases)]


@buckets_in
def test_micro_batch_shows_its_parts(release, exercised):
    """A micro-batch shows what surrounds the model's forward: inputs, log-probs and loss."""
    run = exercised(release)
    (update,) = run.named("actor.update")
    of_engine = [s for s in run.named("actor.micro_batch") if update.start_ns <= s.start_ns < update.end_ns]
    assert len(of_engine) == 2
    for micro_batch in of_engine:
        parts = [
            span
            for span in run.spans
            if span.name.startswith("micro_batch.") and micro_batch.start_ns <= span.start_ns < micro_batch.end_ns
        ]
        assert [part.name for part in parts] == ["micro_batch.inputs", "micro_batch.log_probs", "micro_batch.loss"]
        assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(parts))
        assert parts[-1].end_ns <= micro_batch.end_ns


@every_release
def test_every_micro_batch_has_log_probs(release, exercised):
    """Every micro-batch has a span in which its log-probs are computed from the logits.

    An update has two, and in releases with an engine's phases each of their four log-probs has two.
    """
    made = exercised(release).named("micro_batch.log_probs")
    assert len(made) == 2 * (release.line <= 7) + 2 * 5 * (release.line >= 7) + 2 * 2 * (release.line >= 8)


@pytest.mark.parametrize("release", [r for r in RELEASES if r.line >= 8], ids=lambda r: r.version)
def test_distillation_loss_has_two_parts(release, exercised):
    """A distillation loss is a span, and so is its part on the logits.

    The last two updates have one: by a teacher's log-probs of each token, then of the two likeliest ones.
    """
    run = exercised(release)
    parts = {"micro_batch.log_probs", "micro_batch.loss"}
    spans = [span for span in run.spans if span.name in parts and "error" not in span.args]
    made = [
        [(span.name, span) for span in spans if batch.start_ns <= span.start_ns < batch.end_ns]
        for batch in run.named("actor.micro_batch")[-4:]
    ]
    for of_tokens in made[:2]:
        assert [name for name, _ in of_tokens] == ["micro_batch.log_probs", "micro_batch.loss"]
    for of_likeliest in made[2:]:
        (_, log_probs), (on_logits, first), (loss, last) = of_likeliest
        assert on_logits == loss == "micro_batch.loss"
        assert first.end_ns <= log_probs.end_ns <= last.start_ns, "while there are logits"


@buckets_in
def test_switch_is_weight_sync_and_waking(release, exercised):
    """A switch is weight sync, except for the waking."""
    run = exercised(release)
    assert switch_of(run) == PHASES_OF_A_SWITCH
    assert next(s.args["tags"] for s in run.named("rollout.wake_weights")) == ["weights"]


@buckets_in
def test_buckets_match_gathered_and_loaded(release, exercised):
    """The buckets add up to what was gathered and to what was loaded."""
    run = exercised(release)
    gathered = {s.args["tensor"]: s.args["bytes"] for s in run.named("weight_sync.gather") if "tensor" in s.args}
    assert gathered == {"embedding": 800_000, "norm": 14, "head": 800_000, "bias": 60}
    sent = {span.args["bucket"]: span.args["bytes"] for span in run.named("weight_sync.send")}
    loaded = {span.args["bucket"]: span.args["bytes"] for span in run.named("weight_sync.load")}
    assert list(sent.values()) == [800_014, 800_060]
    assert sent == loaded
    assert sum(sent.values()) == sum(gathered.values())
    ways = {span.args["by"] for name in ("weight_sync.send", "weight_sync.load") for span in run.named(name)}
    assert ways == {"shm"}  # without CUDA's IPC verl copies a bucket to shared memory


@buckets_in
def test_arrows_join_sent_and_loaded_buckets(release, exercised):
    """An arrow leads from each bucket that is sent to the bucket that is loaded."""
    run = exercised(release)
    leaving = [key for span in run.named("weight_sync.send") for key in span.flows_out]
    arriving = [key for span in run.named("weight_sync.load") for key in span.flows_in]
    assert len(set(leaving)) == 2
    assert leaving == arriving
    waits = [span.args["bucket"] for span in run.named("weight_sync.wait") if "bucket" in span.args]
    assert waits == [span.args["bucket"] for span in run.named("weight_sync.send")]


@buckets_in
def test_sender_is_always_in_a_stage(release, exercised):
    """From the call that asks the engine to receive to its end, the sender is in one stage after the other.

    It waits for the engine, gathers and packs tensors, and waits for the engine again when all buckets are sent.
    """
    run = exercised(release)
    names = ("gather", "pack", "send", "wait")
    stages = sorted((span for name in names for span in run.named(f"weight_sync.{name}")), key=lambda s: s.start_ns)
    order = [stage.name.removeprefix("weight_sync.") for stage in stages]
    assert all(one.end_ns <= other.start_ns for one, other in itertools.pairwise(stages))
    bucket = ["pack", "send", "wait"]
    # The third tensor is there when the first bucket turns out to be full, and is packed behind it.
    two, rest = ["gather", "pack"] * 2, ["pack", "gather", "pack", "gather"]
    assert order == ["wait", *two, "gather", *bucket, *rest, *bucket, "wait"]
    packed = [span.args["bytes"] for span in run.named("weight_sync.pack") if "bytes" in span.args]
    assert packed == [800_000, 14, 800_000, 60]
    assert {stage.task for stage in stages} == {stages[0].task}


on_sglang = pytest.mark.parametrize("release", [r for r in RELEASES if r.line >= 6], ids=lambda r: r.version)


@on_sglang
def test_sglang_is_woken_by_tag(release, exercised):
    """An engine of SGLang is woken by tag and put to sleep."""
    names = ("rollout.wake_weights", "rollout.wake_kv_cache", "rollout.sleep")
    said = [(span.name, span.args.get("tags")) for span in exercised(release).switch_to_sglang if span.name in names]
    assert said == list(zip(names, (["weights"], ["kv_cache"], None), strict=True))


@on_sglang
def test_sglang_bucket_is_sent_and_awaited(release, exercised):
    """A bucket for SGLang is gathered, sent and waited for."""
    spans = exercised(release).switch_to_sglang
    gathered = {
        s.args["tensor"]: s.args["bytes"] for s in spans if s.name == "weight_sync.gather" and "tensor" in s.args
    }
    assert gathered == {"embedding": 800_000, "norm": 14, "head": 800_000, "bias": 60}
    sends = [span for span in spans if span.name == "weight_sync.send"]
    assert [(send.args["bytes"], send.args["tensors"]) for send in sends] == [(800_014, 2), (800_060, 2)]
    waits = [span for span in spans if span.name == "weight_sync.wait"]
    assert [wait.args["bucket"] for wait in waits] == [send.args["bucket"] for send in sends]
    assert [send.flows_out for send in sends] == [(f"bucket:{send.args['bucket']}",) for send in sends]
    # One after the other: sent until the request is made, then waited for.
    assert all(send.end_ns <= wait.start_ns for send, wait in zip(sends, waits, strict=True))
    assert waits[0].end_ns <= sends[1].start_ns


@pytest.mark.parametrize("release", [r for r in RELEASES if r.line >= 8], ids=lambda r: r.version)
def test_sglang_adapter_is_awaited(release, exercised):
    """An adapter for SGLang is waited for, and its arrow leaves from that wait."""
    (wait,) = exercised(release).adapter_for_sglang
    assert (wait.name, wait.flows_out) == ("weight_sync.wait", (f"bucket:{wait.args['bucket']}",))


# ---- dispatch ---------------------------------------------------------------------------------------------------


class Dispatched:
    """What a traced program printed, and what its processes recorded."""

    def __init__(self, out, folder):
        self.out = out
        self.processes = [process for process in Recording.open(folder).processes if list(process.events())]
        events = [event for process in self.processes for event in process.events() if isinstance(event, Span)]
        self.spans = sorted(events, key=lambda span: span.start_ns)

    def calls_of(self, method):
        """The parts of the call of a method, from its dispatch to the next one."""
        parts = [span for span in self.spans if span.name in ("ray.dispatch", "ray.execute", "ray.collect")]
        first = next(i for i, span in enumerate(parts) if span.args.get("method") == method)
        after = (i for i, span in enumerate(parts) if i > first and span.name == "ray.dispatch")
        return parts[first : next(after, len(parts))]


def code_of(release, module, *names):
    """What Python reads of a function of a release, for comparison; of one that is not installed yet, its version."""
    folder = CACHE / f"verl-{release.version}"
    if not folder.exists():
        return release.version
    if not (folder / module).exists():
        return None
    node = ast.parse((folder / module).read_text())
    for name in names:
        node = next((inner for inner in node.body if getattr(inner, "name", None) == name), None)
        if node is None:
            return None
    return ast.dump(node)


def dispatching():
    """The releases to dispatch in: the oldest, and the newest of those that do it by the same code.

    Workers are made by `Worker.__init__`, which each release runs to its end anyway, in `exercised`.
    """
    newest = {code_of(release, "verl/single_controller/ray/base.py", "func_generator"): release for release in RELEASES}
    every = os.environ.get("RLTRACE_TEST_EVERY_RELEASE")
    return tuple(release for release in RELEASES if every or release in (RELEASES[0], *newest.values()))


dispatching_release = pytest.mark.parametrize("release", dispatching(), ids=lambda release: release.version)


def test_like_dispatch_is_called_once():
    """Releases that dispatch alike are called once, and `make test-verl` calls all of them."""
    assert {RELEASES[0], RELEASES[-1]} <= set(dispatching()) <= set(RELEASES)


@pytest.fixture(scope="module")
def dispatched(tmp_path_factory):
    """Calls a worker group of a release under the start-up hook, once."""

    @functools.cache
    def dispatch(release):
        scratch = tmp_path_factory.mktemp(f"dispatch-{release.version}")
        folder = scratch / "recording"
        manifest.create(folder, owner=None, command=[], config=None)
        out = forked_output(scratch, release, "dispatch_calls.py", recording=folder)
        return Dispatched(out, folder)

    return dispatch


@dispatching_release
def test_worker_group_returns_the_same(release, dispatched):
    """A worker group returns what it returns without hooks."""
    lines = dispatched(release).out.splitlines()
    assert lines[-5:] == ["[10.0, 11.0, 12.0, 13.0]", "[0, 1]", "[5, 6]", "KeyError True", "tiny_add"]


@dispatching_release
def test_call_has_three_parts(release, dispatched):
    """A call is dispatched, executed and collected."""
    run = dispatched(release)
    parts = run.calls_of("tiny_add")
    assert [span.name for span in parts] == ["ray.dispatch", "ray.execute", "ray.collect"]
    divided = {"mode": "dp_compute_data_proto", "mesh": [2, 1], "chunk": 2}
    assert parts[0].args == {"method": "tiny_add", "blocking": True, "calls": 2, **divided}
    assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(parts))
    # Who is not waited for executes elsewhere, and the driver goes on.
    assert [span.name for span in run.calls_of("tiny_later")] == ["ray.dispatch", "ray.collect"]


@dispatching_release
def test_dispatch_says_how_it_divides_a_batch(release, dispatched):
    """A dispatch over a mesh has its name and its shape; one to all divides nothing."""
    run = dispatched(release)
    assert run.calls_of("tiny_whoami")[0].args["mode"] == "one_to_all"
    if release.line >= 6:
        said = run.calls_of("tiny_add_over_mesh")[0].args
        assert (said["mode"], said["mesh_name"]) == ("lazy_compute_data_proto", "tiny")
        assert (said["mesh"], said["chunk"], said["calls"]) == ([1, 2], 4, 2)


@dispatching_release
def test_places_say_bundles_and_strategy(release, dispatched):
    """A resource pool says its bundles and how they are packed, and so does each placement group of Ray's."""
    spans = dispatched(release).spans
    (places,) = [span for span in spans if span.name == "ray.placement_groups"]
    assert (places.args["strategy"], places.args["bundles"]) == ("STRICT_PACK", [2])
    asked = [span.args for span in spans if span.name == "ray.placement_group"]
    assert asked == [{"strategy": "STRICT_PACK", "bundles": 2, "each": ["CPU 1"]}]


@dispatching_release
def test_raising_call_ends_where_it_was(release, dispatched):
    """A call that raises in a worker ends in the part where it was."""
    parts = dispatched(release).calls_of("tiny_fail")
    assert [(span.name, span.args.get("error")) for span in parts] == [
        ("ray.dispatch", None),
        ("ray.execute", "RayTaskError(KeyError)"),
    ]
    assert all(span.end_ns is not None for span in dispatched(release).spans)


@dispatching_release
def test_dispatch_points_to_every_rank(release, dispatched):
    """An arrow leads from each dispatch to every rank."""
    run = dispatched(release)
    (dispatch, execute, _) = run.calls_of("tiny_add")
    leaving = {
        key
        for span in run.spans
        if span.name == "ray.submit" and dispatch.start_ns <= span.start_ns < dispatch.end_ns
        for key in span.flows_out
    }
    arriving = {
        key: process.rank
        for process in run.processes
        for span in process.events()
        if isinstance(span, Span) and span.name == "ray.call"
        for key in span.flows_in
    }
    assert sorted(arriving[key] for key in leaving) == [0, 1]
    on_workers = [s for s in run.spans if s.name == "ray.call" and set(s.flows_in) & leaving]
    assert all(dispatch.start_ns <= s.start_ns and s.end_ns <= execute.end_ns for s in on_workers)


@dispatching_release
def test_workers_say_their_rank_and_their_device(release, dispatched):
    workers = [p for p in dispatched(release).processes if p.rank is not None]
    assert sorted((p.role, p.rank, p.device["uuid"]) for p in workers) == [
        ("worker", 0, "cpu-0"),
        ("worker", 1, "cpu-1"),
    ]


@pytest.mark.parametrize("release", [r for r in dispatching() if r.line >= 8], ids=lambda r: r.version)
def test_trainer_in_a_script_is_the_driver(release, dispatched):
    """A trainer that is part of a script, as verl has one since 0.8, is the driver and numbers its steps."""
    (trainer,) = [process for process in dispatched(release).processes if process.name == "trainer"]
    steps = [event for event in trainer.events() if isinstance(event, Span) and event.name == "step"]
    assert (trainer.role, [step.args for step in steps]) == ("driver", [{"step": 5}, {"step": 6}])


@pytest.mark.parametrize("release", [r for r in dispatching() if r.line >= 7], ids=lambda r: r.version)
def test_driver_waits_for_sync(release, dispatched):
    """The driver has a span that waits for a sync, whether it awaits the sync or not."""
    run = dispatched(release)
    (update,) = [span for span in run.spans if span.name == "trainer.update_weights"]
    dispatch = run.calls_of("tiny_update_weights")[0]
    assert update.start_ns <= dispatch.start_ns and dispatch.end_ns <= update.end_ns
    assert len([span for span in run.spans if span.name == "trainer.sleep_replicas"]) == 1


# ---- two ranks ----------------------------------------------------------------------------------------------------


EXCHANGED_BY = (
    ("verl/workers/sharding_manager/fsdp_ulysses.py", "FSDPUlyssesShardingManager"),
    ("verl/utils/ulysses.py", "FSDPUlyssesShardingManager"),
    ("verl/utils/ulysses.py", "SeqAllToAll"),
    ("verl/utils/fsdp_utils.py", "collect_lora_params"),
    ("verl/utils/fsdp_utils.py", "layered_summon_lora_params"),
    ("verl/utils/fsdp_utils.py", "fsdp2_load_full_state_dict"),
)
UNTIL_5 = (
    ("verl/workers/sharding_manager/fsdp_vllm.py", "FSDPVLLMShardingManager"),
    ("verl/workers/rollout/hf_rollout.py", "HFRollout"),
)
"""What `two_ranks.py` calls, of every release and of the older ones."""


def exchanging():
    """The releases whose ranks exchange: the newest one, and each that runs a code which no newer one has."""
    known, found = set(), []
    for release in reversed(RELEASES):
        called = EXCHANGED_BY + (UNTIL_5 if release.line <= 5 else ())
        codes = {(module, name, code_of(release, module, name)) for module, name in called}
        if not codes <= known or os.environ.get("RLTRACE_TEST_EVERY_RELEASE"):
            found.append(release)
        known |= codes
    return found[::-1]


exchanging_release = pytest.mark.parametrize("release", exchanging(), ids=lambda release: release.version)
of_sharding_managers = pytest.mark.parametrize(
    "release", [r for r in exchanging() if r.line <= 5], ids=lambda release: release.version
)


def test_like_exchanges_are_made_once():
    """Releases that exchange alike do it once, and `make test-verl` tries all of them."""
    assert {RELEASES[0], RELEASES[-1]} <= set(exchanging()) <= set(RELEASES)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The spans of each rank of a release, once."""

    @functools.cache
    def train(release):
        scratch = tmp_path_factory.mktemp(f"two-{release.version}")
        folder = scratch / "recording"
        forked_output(scratch, release, "two_ranks.py", str(folder))
        processes = sorted(Recording.open(folder).processes, key=lambda process: process.rank)
        spans = [[event for event in process.events() if isinstance(event, Span)] for process in processes]
        assert len(spans) == 2
        return [sorted(of_rank, key=lambda span: span.start_ns) for of_rank in spans]

    return train


def exchanged(spans, *names):
    """Name and arguments of these spans, in order."""
    return [(span.name, span.args) for span in spans if span.name in names]


@exchanging_release
def test_ulysses_says_what_its_ranks_exchange(release, two_ranks):
    """Each rank has the resharding of its batch, and an all-to-all per exchange of heads, in backwards too."""
    for spans in two_ranks(release):
        known = {"ranks": 2, "by": "FSDPUlyssesShardingManager"}
        assert exchanged(spans, "ulysses.preprocess", "ulysses.postprocess") == [
            ("ulysses.preprocess", {"sequences": 2, **known}),
            ("ulysses.postprocess", {"sequences": 4, **known}),
        ]
        assert exchanged(spans, "ulysses.all_to_all") == [("ulysses.all_to_all", {"bytes": 256, "ranks": 2})] * 4


@of_sharding_managers
def test_batch_of_a_tp_group_is_resharded(release, two_ranks):
    """With TP above 1 the sharding manager gathers a batch before generation, and divides it behind."""
    for spans in two_ranks(release):
        known = {"ranks": 2, "by": "FSDPVLLMShardingManager"}
        assert exchanged(spans, "sharding_manager.preprocess", "sharding_manager.postprocess") == [
            ("sharding_manager.preprocess", {"sequences": 2, **known}),
            ("sharding_manager.postprocess", {"sequences": 4, **known}),
        ]


@of_sharding_managers
def test_rollout_of_transformers_is_a_phase(release, two_ranks):
    for spans in two_ranks(release):
        assert exchanged(spans, "rollout.generate") == [("rollout.generate", {"sequences": 2})]


@exchanging_release
def test_first_weights_say_their_bytes(release, two_ranks):
    """What rank 0 has loaded is broadcast: 4 parameters of 76 elements."""
    for spans in two_ranks(release):
        assert exchanged(spans, "fsdp.broadcast") == [("fsdp.broadcast", {"bytes": 304, "tensors": 4})]


@exchanging_release
def test_adapter_says_its_bytes(release, two_ranks):
    """A LoRA adapter is 8 tensors of 256 bytes, gathered at once or layer by layer; this peft finds none by layers."""
    whole = {"adapter": True, "layered": False, "bytes": 2048, "tensors": 8}
    for spans in two_ranks(release):
        ((_, layered),) = exchanged(spans, "weight_sync.gather")
        assert layered == {"adapter": True, "bytes": 256 * layered["tensors"], "tensors": layered["tensors"]}
        collected = exchanged(spans, "actor.adapter_state_dict")
        assert collected == ([("actor.adapter_state_dict", whole)] if release.line >= 6 else [])
