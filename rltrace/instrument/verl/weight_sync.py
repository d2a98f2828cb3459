"""verl's weight sync: the sharding manager and its successors, gathering, and the buckets on their way.

All of a worker's switch to the rollout is `weight_sync`, apart from the waking of the engine in the middle of it: the
phases of a rank do not overlap.
"""

from __future__ import annotations

from typing import Any

from rltrace.events import wake_up_of
from rltrace.hooks.arguments import argument, attributes, keep_self, with_argument
from rltrace.hooks.bucket_flow import flow_key
from rltrace.hooks.held_span import HeldSpan
from rltrace.hooks.hook import After, Before, Function, Hook, nothing_before
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.hooks.wrapping import watch_items, wrap_arguments, wrap_function
from rltrace.instrument.torch.tensor_sizes import sizes_of, tensor_args
from rltrace.record import spans

# ---- the switch -------------------------------------------------------------------------------------------------


class Switch:
    """The switch of this process to its rollout: which piece of `weight_sync` is open."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether the switch has begun and not ended."""
        self._open = HeldSpan()

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin the switch: the worker turns to the rollout."""
        self.is_on = True
        self._open.open("weight_sync")

    def end(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End the switch: the engine has the weights, or something raised."""
        self.is_on = False
        self._open.close(error)

    def begin_wake(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a wake-up of the engine, which is no part of the sync."""
        self._open.close()
        tags = argument("tags", 1, args, kwargs, None)
        return spans.automatic_span(wake_up_of(tags), tags=None if tags is None else list(tags)).__enter__()

    def end_wake(self, opened: Any, result: Any, error: BaseException | None) -> None:
        """End the wake-up; the sync goes on if there is one."""
        end_span(opened, result, error)
        if self.is_on:
            self._open.open("weight_sync")


_switch = Switch()


def enter(patches: PatchSet, target: str) -> None:
    """Hook a worker's switch to its rollout."""
    patches.around(target, _switch.begin, _switch.end, ("weight_sync",))


def wake(patches: PatchSet, target: str) -> None:
    """Hook what wakes the engine, by tags where it knows them."""
    patches.around(target, _switch.begin_wake, _switch.end_wake, ("rollout.wake_weights", "rollout.wake_kv_cache"))


# ---- gathering --------------------------------------------------------------------------------------------------


def gather_tensor(patches: PatchSet, target: str) -> None:
    """Hook the gathering of one tensor: other code uses it too, so it is a span only during a sync."""
    patches.span(target, "weight_sync.gather", gather_args)


def gather_args(tensor: Any, *_: Any, **__: Any) -> dict[str, Any] | None:
    """Return the size of a tensor that is gathered in a sync."""
    return tensor_args(tensor) if _switch.is_on else None


def gather_items(patches: PatchSet, target: str) -> None:
    """Hook what is given the parameters one by one: each is gathered when it is asked for."""
    patches.arguments(target, watch_weights, ("weight_sync.gather",))


def watch_weights(hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the iterable of (name, tensor); an asynchronous one stays as it is."""
    weights = argument("weights", 1, args, kwargs)
    if not hasattr(weights, "__iter__"):
        return args, kwargs
    watched = watch_items(weights, hook, begin_gather, end_gather)
    return with_argument("weights", 1, args, kwargs, watched)


def begin_gather(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Open the span: somebody asks for the next parameter."""
    _sending.stop()
    return spans.automatic_span("weight_sync.gather").__enter__()


def end_gather(opened: Any, item: Any, error: BaseException | None) -> None:
    """Close the span: the parameter is whole; the last `next` finds none. What follows is packing."""
    packed: dict[str, int] = {}
    try:
        if item is not None:
            sizes = tensor_args(item[1])
            packed = {"bytes": sizes["bytes"]}
            opened.set(tensor=item[0], **sizes)
    finally:
        end_span(opened, None, error)
    if error is None:
        _sending.pack(**packed)


# ---- buckets ----------------------------------------------------------------------------------------------------


class Sending:
    """What the sender does where verl has no function for it: it packs, and it waits for the engine.

    It waits until the engine has mapped the memory of the buckets, and behind the last bucket until the engine is done.
    """

    def __init__(self) -> None:
        self._is_on = False
        """Whether the adapter sends weights, or waits for the engine before or behind that."""
        self._is_packing = False
        self._stage = HeldSpan()

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin with a wait: the engine is asked to receive."""
        self._is_on = True
        self._stage.open("weight_sync.wait")

    def pack(self, **sizes: int) -> None:
        """Begin to pack a tensor of so many bytes, or to wait for the copies of those before it."""
        if self._is_on:
            self._stage.open("weight_sync.pack", **sizes)
            self._is_packing = True

    def stop(self, error: BaseException | None = None) -> bool:
        """End what it does, which `error` has ended if it is one; return whether it packed."""
        packed, self._is_packing = self._is_packing, False
        self._stage.close(error)
        return packed

    def wait_for_the_rest(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        """Wait for the engine: all is sent, and the memory of the buckets is free."""
        if self._is_on:
            self._stage.open("weight_sync.wait")

    def end(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End it: the engine has the weights, or something raised."""
        self._is_on = False
        self.stop(error)


_sending = Sending()


def send_items(patches: PatchSet, target: str) -> None:
    """Hook the adapter that gathers parameters, packs them into buckets and sends these."""

    def wrap(original: Function, hook: Hook) -> Function:
        gathers = wrap_arguments(original, hook, watch_weights, is_counted=False)
        return wrap_function(gathers, hook, _sending.begin, _sending.end)

    patches.wrap(target, wrap, ("weight_sync.gather", "weight_sync.pack", "weight_sync.wait"))


def clean_up(patches: PatchSet, target: str) -> None:
    """Hook the sender's last function, behind which the adapter waits for the engine."""
    patches.around(target, nothing_before, _sending.wait_for_the_rest, ("weight_sync.wait",))


class Transfers:
    """Counts the transfers over each handle: sender and receiver of one are in step, so both name a bucket alike."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}

    def begin(self, handle: str) -> Buckets:
        """Begin the next transfer over this handle."""
        self._begun[handle] = self._begun.get(handle, 0) + 1
        return Buckets(f"{handle.rpartition('/')[2]}:{self._begun[handle]}")


class Buckets:
    """The buckets of one transfer, by number."""

    def __init__(self, transfer: str) -> None:
        self._transfer = transfer
        self._number = 0

    def next_key(self) -> str:
        """Return the key of the next bucket."""
        self._number += 1
        return f"{self._transfer}:{self._number}"


_sent, _received = Transfers(), Transfers()


def watch_sender(patches: PatchSet, target: str) -> None:
    """Hook the opening of the sender's socket: verl has no function that sends one bucket."""
    reads = attributes(target.rpartition(".")[0], "socket", "zmq_handle")
    patches.wrap(target, watch_socket, ("weight_sync.send", "weight_sync.wait"), reads=reads)


def watch_socket(original: Function, hook: Hook) -> Function:
    """Wrap `_init_socket`: the socket it makes watches what is sent over it."""

    def replace(sender: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:  # it goes with the sender at the end of the transfer
            sender.socket = BucketSocket(sender.socket, _sent.begin(sender.zmq_handle), way_of(sender), hook)

    return wrap_function(original, hook, keep_self, replace)


def way_of(end: Any) -> str:
    """Return by which way a bucket's memory is shared: where CUDA cannot do it, verl copies it to the host."""
    return "shm" if getattr(end, "use_shm", False) else "ipc"


class BucketSocket:
    """A sender's ZeroMQ socket: sending a bucket and waiting for its acknowledgement are spans."""

    def __init__(self, socket: Any, buckets: Buckets, way: str, hook: Hook) -> None:
        self._socket = socket
        self._buckets = buckets
        self._way = way
        self._hook = hook
        self._awaited: str | None = None
        """The key of the bucket that is not acknowledged."""
        self._packs = False
        """Whether the next tensor is there, and is packed when that bucket is acknowledged."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_pyobj(self, message: Any, *args: Any, **kwargs: Any) -> Any:
        """Send a message; one that describes a bucket is a span with its bytes."""
        if not isinstance(message, dict) or "bucket_meta" not in message:
            return self._socket.send_pyobj(message, *args, **kwargs)
        return self._watched(self._socket.send_pyobj, self._begin_send, end_span)(message, *args, **kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        """Receive a message, which after a bucket is the acknowledgement."""
        if self._awaited is None:
            return self._socket.recv(*args, **kwargs)
        return self._watched(self._socket.recv, self._begin_wait, self._end_wait)(*args, **kwargs)

    def _watched(self, original: Function, begin: Before, after: After) -> Function:
        return wrap_function(original, self._hook, begin, after)

    def _begin_send(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        self._packs = _sending.stop() and not args[0].get("is_last", False)
        self._awaited = key = self._buckets.next_key()
        tensors = args[0]["bucket_meta"]
        size_bytes = sum(meta["shape"].numel() * meta["dtype"].itemsize for meta in tensors.values())
        opened = spans.automatic_span(
            "weight_sync.send", bucket=key, bytes=size_bytes, tensors=len(tensors), by=self._way
        ).__enter__()
        spans.flow(flow_key(key), "out")
        return opened

    def _begin_wait(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        key, self._awaited = self._awaited, None
        return spans.automatic_span("weight_sync.wait", bucket=key).__enter__()

    def _end_wait(self, opened: Any, result: Any, error: BaseException | None) -> None:
        end_span(opened, result, error)
        if self._packs:
            _sending.pack()


def watch_receiver(patches: PatchSet, target: str) -> None:
    """Hook the receiver, which calls a function that loads each bucket."""
    reads = attributes(target.rpartition(".")[0], "zmq_handle")
    patches.arguments(target, watch_loads, ("weight_sync.load",), reads=reads)


def watch_loads(hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the callback that loads each bucket."""
    load = argument("on_bucket_received", 1, args, kwargs)
    buckets, way = _received.begin(args[0].zmq_handle), way_of(args[0])

    def begin_load(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        key, weights = buckets.next_key(), args[0]
        sizes = sizes_of([tensor for _, tensor in weights])
        opened = spans.automatic_span("weight_sync.load", bucket=key, **sizes, by=way).__enter__()
        spans.flow(flow_key(key), "in")
        return opened

    watched = wrap_function(load, hook, begin_load, end_span)
    return with_argument("on_bucket_received", 1, args, kwargs, watched)
