"""What verl's hooks promise without any of its releases; on the real wheels they are called in tests/verl_releases."""

import asyncio
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

import rltrace
from rltrace import recorder
from rltrace.instrument.verl import rollout
from rltrace.instrument.verl.hook_points import FIRST, HOOK_POINTS, LAST
from rltrace.patching import PatchSet

BIND = """
import sys
from rltrace.instrument.verl import Verl
from rltrace.patching import PatchSet

class Rows:
    def hook(self, instrumentation, target, state, reason=None, emits=()):
        print(target, state, reason)
        return self
    def fired(self):
        pass

patches = PatchSet("verl", Rows(), Verl.supports)
Verl().install(patches)
import verl
print("runs on")
"""


def bind_to(version, tmp_path):
    """What the hooks report when a verl of this version is imported; it has no modules but its own."""
    package = tmp_path / "verl"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    metadata = tmp_path / f"verl-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{BIND}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "0.10.0", "1.0.0"])
def test_a_release_that_nobody_has_read_is_skipped_with_the_reason(version, tmp_path):
    *lines, last = bind_to(version, tmp_path)
    assert last == "runs on"
    assert lines[-1] == (
        f"verl:__version__ skipped verl {version} is outside of what this hook knows: verl >= 0.4.1, < 0.10"
    )
    assert len(lines) == 2  # it waited, and was skipped: no other place is named


@pytest.mark.parametrize("line", range(FIRST, LAST + 1))
def test_only_the_places_of_the_release_that_is_there_are_named(line, tmp_path):
    lines = bind_to(f"0.{line}.1", tmp_path)
    named = {text.split()[0] for text in lines[:-1]} - {"verl:__version__"}
    assert named == {point.target for point in HOOK_POINTS if point.is_in(line)}
    assert lines[-1] == "runs on"


@pytest.mark.parametrize("line", range(FIRST, LAST + 1))
def test_no_place_is_named_twice_in_a_release(line):
    targets = [point.target for point in HOOK_POINTS if point.is_in(line)]
    assert len(targets) == len(set(targets))
    assert all(point.since <= point.until for point in HOOK_POINTS)


def test_a_server_generates_while_a_request_is_in_flight(folder, spans_of):
    """verl's server cannot run without vLLM: its `generate` is stood in for, two requests that overlap and a third."""
    rltrace.start(folder, role="server")
    module = ModuleType("a_server")

    async def generate(prompt_ids, request_id, seconds):
        await asyncio.sleep(seconds)
        return SimpleNamespace(token_ids=[1, 2, 3])

    module.generate = generate
    sys.modules["a_server"] = module
    patches = PatchSet("verl", recorder.current())
    rollout.serve(patches, "a_server:generate")

    async def serve():
        requests = [module.generate(prompt_ids=[7] * n, request_id=f"r{n}", seconds=n / 100) for n in (1, 2)]
        await asyncio.gather(*requests)
        cancelled = asyncio.ensure_future(module.generate(prompt_ids=[7], request_id="r3", seconds=100))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)

    asyncio.run(serve())
    patches.undo()
    del sys.modules["a_server"]
    rltrace.stop()
    requests = spans_of(folder, "server.request")
    assert [span.args.get("tokens") for span in requests] == [3, 3, None]
    assert [span.args["prompt_tokens"] for span in requests] == [1, 2, 1]
    both, last = spans_of(folder, "rollout.generate")
    assert both.start_ns <= requests[0].start_ns and requests[1].end_ns <= both.end_ns <= last.start_ns
    assert last.end_ns is not None
    assert both.is_phase
