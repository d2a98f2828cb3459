"""verl's buckets to SGLang: a request to the engine's server for each, which is answered when it is loaded."""

from __future__ import annotations

from typing import Any

from rltrace.hooks.arguments import argument
from rltrace.hooks.bucket_flow import flow_key
from rltrace.hooks.held_span import HeldSpan
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.instrument.sglang.buckets import Keys, handles_of
from rltrace.instrument.torch.tensor_sizes import sizes_of
from rltrace.instrument.verl.worker import first
from rltrace.record import spans


class Sending:
    """The bucket that this process sends: it is sent until its request is made, then waited for until the answer."""

    def __init__(self) -> None:
        self._keys = Keys()
        self._open = HeldSpan()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin sending: the bucket is complete, and what follows makes handles of its tensors."""
        tensors = argument("params_batch", 1, args, kwargs)
        self._open.open("weight_sync.send", **sizes_of([tensor for _, tensor in tensors]))

    def end(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End the sending of a rank that makes no request to the server."""
        self._open.close(error)

    def begin_wait(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the sending and begin the wait: the request goes to the server."""
        request = first(args[1:], kwargs)
        handles = handles_of(request)
        known = {} if handles is None else {"bucket": self._keys.of(handles)}
        is_sent_here = not self._open  # by who asks the engine without SGLang's function
        if not is_sent_here and known:
            self._open.set(**known)
            spans.flow(flow_key(known["bucket"]), "out")
        self._open.close()
        opened = spans.automatic_span("weight_sync.wait", **known).__enter__()
        if is_sent_here and known:
            spans.flow(flow_key(known["bucket"]), "out")
        return opened


_sending = Sending()


def send(patches: PatchSet, target: str) -> None:
    """Hook SGLang's function that sends one bucket, by the name under which verl calls it."""
    patches.around(target, _sending.begin, _sending.end, ("weight_sync.send",))


def wait(patches: PatchSet, target: str) -> None:
    """Hook the request to the server."""
    patches.around(target, _sending.begin_wait, end_span, ("weight_sync.wait",))


def hand_over(patches: PatchSet, target: str) -> None:
    """Hook the engine in the worker's own process, which makes the handles and waits for the answer."""
    patches.span(target, "weight_sync.send", tensors_args)


def tensors_args(_engine: Any, named_tensors: Any = (), *_: Any, **__: Any) -> dict[str, Any]:
    """Return the number of a bucket's tensors; they are handles already, and do not say their bytes."""
    return {"tensors": len(named_tensors or ())}
