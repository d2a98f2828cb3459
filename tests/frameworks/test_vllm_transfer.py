"""vLLM's own weight transfer: the real receiving end, with memory of the host where NCCL would bring the bytes."""

from __future__ import annotations

import pytest
from framework_runs import TIMEOUT_SECONDS, result, run_bare, write_program

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

# What NCCL does needs two GPUs: all else of the call is vLLM's.
PROGRAM = """
    import json
    import sys

    import rltrace
    from rltrace.events import Span
    from rltrace.hooks.patching import PatchSet
    from rltrace.instrument.vllm import weight_transfer
    from rltrace.record import spans

    rltrace.start("recording")
    patches = PatchSet("vllm", spans.current())
    weight_transfer.name_hooks(patches)
    import torch
    from vllm.distributed.weight_transfer import nccl_engine

    torch.cuda.current_stream = lambda: None
    loaded = []

    class Group:
        def broadcast(self, tensor, src, stream):
            tensor.fill_(7)

    class Model:
        def load_weights(self, weights):
            loaded.extend((name, tensor.float().mean().item()) for name, tensor in weights)

    engine = object.__new__(nccl_engine.NCCLWeightTransferEngine)
    engine.model_update_group, engine.model, engine.packed, engine.device = Group(), Model(), False, "cpu"
    told = nccl_engine.NCCLWeightTransferUpdateInfo(
        names=["a", "b"], dtype_names=["bfloat16", "float32"], shapes=[[4, 8], [3]]
    )
    engine.receive_weights(told)
    rltrace.stop()
    (process,) = rltrace.Recording.open("recording").processes
    said = [(span.name, span.args) for span in process.events() if isinstance(span, Span)]
    states = {hook.target: hook.state for hook in patches.hooks}
    print("RESULT " + json.dumps({"loaded": loaded, "spans": said, "states": states}))
"""


def test_what_is_received_says_its_bytes(openrlhf_environment, tmp_path):
    """An update says its way, its bytes and its tensors, and both ends are hooked."""
    done = run_bare(openrlhf_environment, write_program(tmp_path, PROGRAM))
    assert done.returncode == 0, done.stderr[-4000:]
    found = result(done.stdout)
    assert found["loaded"] == [["a", 7.0], ["b", 7.0]]
    transfers = [span for span in found["spans"] if span[0].startswith("weight_sync.")]
    assert transfers == [["weight_sync.load", {"by": "nccl", "bytes": 4 * 8 * 2 + 3 * 4, "tensors": 2}]]
    of_nccl = {target for target, state in found["states"].items() if "nccl_engine" in target and state == "installed"}
    assert len(of_nccl) == 2
