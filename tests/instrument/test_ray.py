"""Hooks on Ray: real actors on a CPU, called every way that Ray knows."""

import functools
import importlib
import os
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import pytest
from traced_runs import TracedRun

import rltrace
from rltrace.analysis.fates import fates
from rltrace.analysis.summary import summarize
from rltrace.events import RAY_CALL, Span
from rltrace.hooks.hook import NOBODY, Hook
from rltrace.hooks.patching import PatchSet, nothing_after
from rltrace.instrument.ray import WORTH_NS, forget_inherited, placement_args, task_of, watch_tasks
from rltrace.read.recording import Recording

pytestmark = pytest.mark.run

PROGRAMS = Path(__file__).parents[1] / "programs"

CALLS = """
    class Plain:
        def __init__(self, base):
            self.base = base
        def add(self, a, b=1):
            with rltrace.span("inner"):
                return self.base + a + b
        def fail(self):
            raise KeyError("theirs")
        def two(self):
            return 1, 2
        def nothing(self):
            pass
        def stream(self, n):
            for i in range(n):
                yield i
        @staticmethod
        def fixed():
            return "fixed"

    class Asynchronous:
        async def add(self, a):
            await asyncio.sleep(0.05)
            return a + 1
        async def stream(self, n):
            for i in range(n):
                yield i

    def calls():
        plain = ray.remote(Plain).remote(10)
        print(ray.get(plain.add.remote(1, b=2)))
        print(ray.get(plain.two.options(num_returns=2).remote()))
        print(plain.nothing.options(num_returns=0).remote())
        print([ray.get(ref) for ref in plain.stream.options(num_returns="streaming").remote(3)])
        print(ray.get(plain.fixed.remote()))
        try:
            ray.get(plain.fail.remote())
        except KeyError as error:
            print(type(error).__name__)
        asynchronous = ray.remote(Asynchronous).remote()
        print(ray.get([asynchronous.add.remote(i) for i in range(3)]))
        print([ray.get(ref) for ref in asynchronous.stream.remote(2)])
        return plain, asynchronous
"""

TASKS = """
    @ray.remote
    def double(number):
        time.sleep(0.05)
        return 2 * number

    @ray.remote(num_returns="streaming")
    def stream(n):
        for number in range(n):
            yield number

    @ray.remote(num_returns=2, max_calls=1)
    def once():
        return "once", os.getpid()

    @ray.remote
    def fail():
        raise KeyError("theirs")

    def tasks():
        print(ray.get([double.remote(number) for number in range(3)]))
        print([ray.get(reference) for reference in stream.remote(3)])
        print(ray.get(once.remote()[1]) != ray.get(once.remote()[1]))
        ready, rest = ray.wait([double.remote(3), double.remote(4)], num_returns=2)
        print(len(ready), len(rest), len(ray.wait(ready, timeout=0)[0]))
        try:
            ray.wait(ready[0])
        except TypeError:
            print("no list")
        late = double.remote(5)
        try:
            ray.get(late, timeout=0)
        except ray.exceptions.GetTimeoutError:
            print("not there", ray.get(late))
        try:
            ray.get(fail.remote())
        except KeyError as error:
            print(type(error).__name__)
"""

SAMPLES = 100_000
BATCH = f"""
    @ray.remote
    class Doubles:
        def twice(self, batch):
            return [(2 * number, {{"reward": 1.0}}) for number, _ in batch]

    def batch():
        doubled = ray.get(Doubles.remote().twice.remote([(number, {{}}) for number in range({SAMPLES})]))
        print(sum(number for number, _ in doubled))
"""

ENDINGS = """
    class Idle:
        def pid(self):
            return os.getpid()

    def runs(pid):
        try:
            return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def endings():
        actors = [ray.remote(type(name, (Idle,), {})).remote() for name in ("Killed", "Stopped", "Left")]
        pids = ray.get([actor.pid.remote() for actor in actors])
        os.kill(pids[0], 9)
        ray.kill(actors[1])
        while any(map(runs, pids[:2])):  # a kill takes its time on a busy machine
            time.sleep(0.05)
        for step in range(2):
            with rltrace.span("step", step=step):
                ray.get(actors[2].pid.remote())
        return actors
"""

WATCHED = f"""
    def watched():
        sys.argv.append("45")
        exec(open({str(PROGRAMS / "until_looked_at.py")!r}).read(), {{}})
"""
"""Until all processes were examined by their packages too."""


def program(*parts):
    """A driver that goes through these parts, one after the other, and leaves its actors to Ray."""
    begin = """
    import asyncio
    import os
    import sys
    import time
    import ray
    import rltrace

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    """
    ends = f"""
    left = []
    for part in ({", ".join(parts)}):
        print("part:", part.__name__)
        with rltrace.span("part", of=part.__name__):
            left.append(part())
    ray.shutdown()
    """
    return "".join(map(textwrap.dedent, (begin, CALLS, TASKS, BATCH, ENDINGS, WATCHED, ends)))


class Part:
    """What was printed in one part of the driver, and what each process recorded meanwhile."""

    def __init__(self, run, name):
        (around,) = [span for span in run.spans("part") if span.args["of"] == name]
        self.out = printed(run)[name]
        self.recorded = []
        for process in run.recording.processes:
            spans = [event for event in process.events() if isinstance(event, Span)]
            inside = [span for span in spans if around.start_ns < span.start_ns < around.end_ns]
            self.recorded.append((process, sorted(inside, key=lambda span: span.start_ns)))

    def spans(self, name=None, role=None):
        """All spans, or those of this name, or of processes with this role."""
        of_role = [span for process, spans in self.recorded for span in spans if role in (None, process.role)]
        return sorted((s for s in of_role if name in (None, s.name)), key=lambda span: span.start_ns)


def printed(run):
    """What each part printed, without the raylet's lines: it may be surprised that a worker of one call has left."""
    lines = [line for line in run.out.splitlines(keepends=True) if "(raylet)" not in line]
    parts = (part.partition("\n") for part in "".join(lines).split("part: ")[1:])
    return {name: out for name, _, out in parts}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """All parts in one cluster, under `rltrace exec`."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "program.py").write_text(program("calls", "tasks", "batch", "endings", "watched"))
    exec_ = [sys.executable, "-m", "rltrace", "exec", "--sample", "0", "--out", "run", "--"]
    done = subprocess.run(
        [*exec_, sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "RLTRACE_DISABLE": "python_gc"},
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return TracedRun(done.returncode, done.stdout, done.stderr, Recording.open(folder / "run"))


@pytest.fixture(scope="module")
def calls(run):
    return Part(run, "calls")


@pytest.fixture(scope="module")
def tasks(run):
    return Part(run, "tasks")


def test_calls_return_the_same(calls):
    """Each call returns what it returns without hooks."""
    alone = ["13", "[1, 2]", "None", "[0, 1, 2]", "fixed", "RayTaskError(KeyError)", "[1, 2, 3]", "[0, 1]"]
    assert calls.out.splitlines() == alone


def test_driver_says_who_ran(run):
    """A driver says which processes ran when it left its cluster.

    Ray kills those that take longer to leave than it likes, which is nobody's death.
    """
    (driver,) = [process for process in run.recording.processes if process.role == "driver"]
    actors = {process.key for process in run.recording.processes if process.name in ("Plain", "Asynchronous")}
    assert len(actors) == 2
    assert driver.left_running >= actors
    assert not [process for process in run.recording.processes if process is not driver and process.left_running]


def test_rays_own_services_are_not_missed(run):
    """They give themselves titles, and load packages."""
    assert "not traced" not in run.err


def test_every_method_is_a_span_on_its_worker(calls):
    methods = [span.args["method"] for span in calls.spans("ray.call")]
    assert sorted(methods) == sorted(
        ["Plain.__init__", "Plain.add", "Plain.two", "Plain.nothing", "Plain.stream", "Plain.fixed", "Plain.fail"]
        + ["Asynchronous.__init__"]
        + ["Asynchronous.add"] * 3
        + ["Asynchronous.stream"]
    )
    errors = {span.args["method"]: span.args["error"] for span in calls.spans("ray.call") if "error" in span.args}
    assert errors == {"Plain.fail": "KeyError"}
    assert all(span.end_ns is not None for span in calls.spans())


def test_asynchronous_method_until_its_end(calls):
    """The span of an asynchronous method ends with the method."""
    adds = [span for span in calls.spans("ray.call") if span.args["method"] == "Asynchronous.add"]
    assert all(span.seconds >= 0.05 for span in adds)
    assert len({span.task for span in adds}) == 3


def test_arrow_from_each_call(calls):
    """An arrow leads from each call to its method."""
    submits = calls.spans("ray.submit")
    leaving = [key for span in submits for key in span.flows_out]
    arriving = {key: span.args["method"] for span in calls.spans("ray.call") for key in span.flows_in}
    assert len(leaving) == len(set(leaving)) == 9
    assert set(leaving) <= set(arriving)
    # A call without results returns no reference, so nobody knows its task where it was made.
    assert [arriving[key] for key in set(arriving) - set(leaving)] == ["Plain.nothing"]


def test_batch_is_told_on_both_sides(run):
    """What a batch takes on its way is told on both sides."""
    batch = Part(run, "batch")
    assert batch.out.strip() == str(SAMPLES * (SAMPLES - 1))
    driver, worker = (functools.partial(batch.spans, role=role) for role in ("driver", "worker"))
    (call,) = (span for span in worker("ray.call") if span.args["method"] == "Doubles.twice")
    (submit,) = driver("ray.submit")
    sent = max(driver("ray.serialize"), key=lambda span: span.args["bytes"])
    received = worker("ray.deserialize")[-1]
    returned = max(worker("ray.serialize"), key=lambda span: span.args["bytes"])
    fetched = driver("ray.deserialize")[-1]
    assert sent.args["bytes"] > SAMPLES and returned.args["bytes"] > SAMPLES and received.args["objects"] >= 1
    assert submit.start_ns <= sent.start_ns < sent.end_ns <= submit.end_ns
    assert submit.start_ns <= received.start_ns < received.end_ns <= call.start_ns
    assert call.end_ns <= returned.start_ns < returned.end_ns <= fetched.start_ns < fetched.end_ns
    # Keys and numbers, which Ray packs beside each argument, are not told.
    assert all(span.end_ns - span.start_ns >= WORTH_NS for span in (*driver("ray.serialize"), returned))


def test_processes_say_what_they_are(calls):
    roles = sorted((process.role, process.identity.get("name")) for process, spans in calls.recorded if spans)
    assert roles == [("driver", None), ("worker", "Asynchronous"), ("worker", "Plain")]
    commands = [" ".join(process.identity["argv"]) for process, _ in calls.recorded]
    assert not any("dashboard" in c or "log_monitor" in c or "setup_worker" in c for c in commands), commands


class Function:
    """What Ray tells of a task's function."""

    function_id = b"id"

    def is_actor_method(self):
        return False


def test_task_loaded_in_a_pause(folder, spans_of):
    """A task that is loaded in a pause is watched after the pause.

    Ray's core keeps the function that it is given first. Here nothing is connected to Ray, and the call starts nothing.
    """
    import ray

    info = namedtuple("Info", ["function", "max_calls"])(lambda number: 2 * number, 7)
    hook = Hook("ray", "a:b", (RAY_CALL,))
    hook.bind(True)
    load = watch_tasks(lambda _manager, _job, _function: info, hook)
    hook.hold(True)
    kept = load(None, None, Function())
    assert (kept.function(2), kept.max_calls) == (4, 7)
    hook.hold(False)
    rltrace.start(folder)
    assert kept.function(3) == 6
    assert load(None, None, Function()) is kept
    rltrace.stop()
    assert [span.name for span in spans_of(folder)] == [RAY_CALL]
    assert not ray.is_initialized()


class Register:
    """Where a hook reports to; nobody reads it."""

    def hook(self, *_, **__):
        return NOBODY


BASE_AND_ACTOR = """
    import ray

    class Base:
        def work(self):
            return 1

    @ray.remote
    class Actor(Base):
        def run(self):
            return self.work()

        def own(self):
            return 2
"""


def test_sent_class_inherits_hooks(tmp_path, monkeypatch):
    """An actor's class goes by value, with the methods of a base of its own module as they were at its decoration."""
    import ray.cloudpickle
    from ray.util.tracing.tracing_helper import _inject_tracing_into_class

    (tmp_path / "base_and_actor.py").write_text(textwrap.dedent(BASE_AND_ACTOR))
    monkeypatch.syspath_prepend(tmp_path)
    called = []
    patches = PatchSet("test", Register())
    patches.around("base_and_actor:Base.work", lambda *_: called.append("work"), nothing_after)
    module = importlib.import_module("base_and_actor")
    try:
        sent = ray.cloudpickle.loads(ray.cloudpickle.dumps(module.Actor.__ray_metadata__.modified_class))
        assert module.Base in sent.__mro__
        assert (sent().run(), called) == (1, [])
        forget_inherited((sent,), {})
        _inject_tracing_into_class(sent)
        assert (sent().run(), sent().own(), called) == (1, 2, ["work"])
    finally:
        patches.undo()
        del sys.modules["base_and_actor"]


def test_placement_group_has_its_bundles():
    """Bundles that are alike are told once."""
    bundles = [{"CPU": 1, "GPU": 1}] * 8
    assert placement_args(bundles, strategy="STRICT_PACK") == {
        "strategy": "STRICT_PACK", "bundles": 8, "each": ["CPU 1, GPU 1"],
    }  # fmt: skip


def test_clients_reference_is_not_asked():
    """A client's reference is not asked for its task.

    Its id comes from the server, and to ask would wait for it.
    """

    class Reference:
        _id_future = object()

        def task_id(self):
            raise AssertionError("waits")

    assert task_of(Reference()) is None


def test_tasks_and_waits_return_the_same(run, tasks):
    """Tasks and waits return what they return without hooks."""
    alone = ["[0, 2, 4]", "[0, 1, 2]", "True", "2 0 1", "no list", "not there 10", "RayTaskError(KeyError)"]
    assert tasks.out.splitlines() == alone
    assert not any(hook["state"] == "failed" for process in run.recording.processes for hook in process.hooks)


def test_tasks_are_spans_with_arrows(tasks):
    """Each task is a span on its worker, with an arrow from its call."""
    called = {key: span for span in tasks.spans("ray.call") for key in span.flows_in}
    submits = tasks.spans("ray.submit")
    assert [span.args["method"] for span in submits if span.end_ns is None] == []
    for submit in submits:
        (key,) = submit.flows_out
        assert called[key].args["method"] == submit.args["method"]
        assert called[key].start_ns > submit.start_ns
    methods = sorted(span.args["method"] for span in called.values())
    assert methods == ["double"] * 6 + ["fail", "once", "once", "stream"]
    errors = {span.args["method"]: span.args["error"] for span in called.values() if "error" in span.args}
    assert errors == {"fail": "KeyError"}
    workers = {process.role for process, spans in tasks.recorded if any(span.name == "ray.call" for span in spans)}
    assert workers == {"worker"}


def test_waiting_for_results_is_seen(tasks):
    """A process that waits for results is seen waiting, and one that only looks is not."""
    gets, waits = (tasks.spans(name, "driver") for name in ("ray.get", "ray.wait"))
    stream = 3 + 1  # the last one for how it ended
    assert [get.args["objects"] for get in gets] == [3, *[1] * stream, 1, 1, 1, 1]
    assert gets[0].seconds >= 0.05
    # Ray's iterator over the results of a stream waits too, for one at a time.
    assert [wait.args for wait in waits if wait.args["objects"] > 1] == [{"objects": 2, "of": 2}]
    assert all(span.end_ns is not None for span in (*gets, *waits))


def test_killed_while_idle(run):
    """A worker that was killed while idle is told from those that Ray stopped.

    Ray has one leave by itself, and ends all others when its driver leaves: those are nobody's death.
    """
    summary = summarize(run.recording)
    found = fates(summary)
    actors = {process.name: process for process in summary.processes if process.name in ("Killed", "Stopped", "Left")}
    assert {name: actor.ran_when_driver_left for name, actor in actors.items()} == {
        "Killed": False, "Stopped": False, "Left": True,
    }  # fmt: skip
    assert {name for name, actor in actors.items() if found[actor.key] == "died"} == {"Killed"}
