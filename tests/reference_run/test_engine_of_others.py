"""The engines of others: calls that another process answers, the last words of one that died, and their answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from rltrace_reference.channel import Channel
from rltrace_reference.config import Config, ModelConfig, RolloutConfig
from rltrace_reference.engine import sglang_engine
from rltrace_reference.engine.calls import Calls, Elsewhere
from rltrace_reference.engine.last_words import last_words
from rltrace_reference.engine.model import matrices
from rltrace_reference.engine.views import checkpoint_views
from rltrace_reference.prediction import predict

from rltrace.errors import RunError


class Answers(Calls):
    """Answers what the tests ask."""

    def on_double(self, number: int) -> int:
        return 2 * number

    def on_refuse(self) -> None:
        raise RunError("refused")

    def on_fail(self) -> None:
        raise ValueError("two\nlines")

    def on_bucket(self, descriptors: list[int]) -> str:
        (descriptor,) = descriptors
        with os.fdopen(descriptor) as file:
            return file.read()


def in_time(_name: str) -> AbstractContextManager[None]:
    return nullcontext()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    """Calls that another thread answers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(ours)
    thread = threading.Thread(target=Answers().serve, args=[Channel(theirs)])
    thread.start()
    yield Elsewhere(channel, in_time)
    channel.send({"call": "exit"})
    thread.join()
    ours.close()
    theirs.close()


def test_a_call_is_answered_elsewhere(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """Results, descriptors and errors pass; the sender's descriptor is closed."""
    assert elsewhere.call("double", {"number": 4}, []) == 8
    (tmp_path / "weights").write_text("bytes")
    descriptor = os.open(tmp_path / "weights", os.O_RDONLY)
    assert elsewhere.call("bucket", {}, [descriptor]) == "bytes"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize(("name", "said"), [("refuse", "refused"), ("fail", "engine of rank 0: ValueError: two lines")])
def test_an_error_elsewhere_is_ours(elsewhere: Elsewhere, name: str, said: str) -> None:
    with pytest.raises(RunError, match=f"^{said}$"):
        elsewhere.call(name, {}, [])


def test_a_process_that_is_gone_answers_nothing() -> None:
    """Nobody waits for an answer of a process that has ended."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.close()
    with pytest.raises(RunError, match=r"^checksums: .*the process with the engine's weights is gone; it said: "):
        Elsewhere(Channel(ours), in_time).call("checksums", {}, [])


def test_last_words_are_the_end_in_one_line() -> None:
    """What a process and its child said is the end of the file that both write, in one line."""
    said = os.fdopen(os.memfd_create("stderr"), "rb")
    program = "import subprocess, sys; print('first', file=sys.stderr); subprocess.run(['sh', '-c', 'echo a  b >&2'])"
    subprocess.run([sys.executable, "-c", program], stderr=said, check=True)
    assert last_words(said) == "first a b"
    assert last_words(said, most_bytes=2) == "b"


def test_the_last_exception_is_said_first() -> None:
    """What an engine's child raised comes before all that was said around it."""
    with os.fdopen(os.memfd_create("stderr"), "w+b") as said:
        program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import absent'], check=False)"
        ending = "print('a child failed', file=sys.stderr)"
        subprocess.run([sys.executable, "-c", f"{program}; {ending}"], stderr=said, check=True)
        words = last_words(said)
    assert words.startswith("ModuleNotFoundError: No module named 'absent' ... Traceback")
    assert words.endswith("a child failed")


def test_a_pipe_remembers_no_words() -> None:
    with subprocess.Popen(["sh", "-c", "echo lost >&2"], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert last_words(process.stderr) == ""


def test_views_are_the_checkpoints_parameters() -> None:
    """Fused and padded weights are seen under a checkpoint's names, and written through."""
    model = ModelConfig()
    fused = {
        name: torch.zeros(sum(shape[0] for shape in members.values()) + 3, *next(iter(members.values()))[1:])
        for name, members in matrices(model).items()
    }
    views = checkpoint_views(fused, model, "SGLang")
    assert {name: tuple(view.shape) for name, view in views.items()} == model.shapes()
    views["model.layers.0.self_attn.v_proj.weight"].fill_(1)
    whole = fused["model.layers.0.self_attn.qkv_proj.weight"]
    assert whole.sum() == 32 * 64 and whole[64 + 32 : 64 + 64].all()
    with pytest.raises(RunError, match=r"SGLang: the model needs .* and parameters unknown here: another"):
        checkpoint_views({**fused, "another": whole}, model, "SGLang")


def answer(**more: Any) -> dict[str, Any]:
    """A sequence as SGLang 0.5.12 answers it with `return_logprob`."""
    said = {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [(-0.5, 7, None), (-2.0, 3, None)],
    }
    return {"output_ids": [7, 3], "meta_info": said | more}


def test_an_answer_of_sglang_is_tokens_and_log_probs() -> None:
    found = sglang_engine.response(answer(), 0)
    assert (found.tokens, found.log_probs) == ([7, 3], [-0.5, -2.0])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"finish_reason": {"type": "abort", "message": "no room"}}, "SGLang ended a sequence by .*no room"),
        ({"output_token_logprobs": [(-0.5, 7, None)]}, "SGLang answered 2 tokens and log-probs of 1 others"),
        ({"output_token_logprobs": [(-0.5, 7, None), (float("nan"), 3, None)]}, "its log-probs are not finite"),
    ],
)
def test_an_answer_that_is_none_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError, match=f"engine of rank 0: {said}"):
        sglang_engine.response(answer(**more), 0)


def test_sglang_takes_its_share_of_what_is_free() -> None:
    """vLLM's share is of the whole card, SGLang's of what the actor's parameters leave of it."""
    limit_bytes = 1 << 34
    config = Config(device="cuda", ranks=1, rollout=RolloutConfig(engine="vllm", gpu_memory_utilization=0.5))
    sglang = replace(config, rollout=replace(config.rollout, engine="sglang"))
    of_vllm, of_sglang = (predict(run, limit_bytes)["rollout.generate"] for run in (config, sglang))
    params = predict(config, limit_bytes)["weight_sync"]["actor.params"]
    smaller = of_vllm["rollout.kv_cache"] - of_sglang["rollout.kv_cache"]
    assert smaller == pytest.approx(params / 2, abs=1)
