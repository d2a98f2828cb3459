"""Messages and file descriptors between a worker and its engine, over one Unix socket."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

HEADER_BYTES = 8


class Channel:
    """One end of a socket pair; a message is what msgpack can encode, with the descriptors that it carries."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send one message.

        Raises:
            ConnectionError: the other process is gone.
        """
        body = msgspec.msgpack.encode(message)
        socket.send_fds(self.end, [len(body).to_bytes(HEADER_BYTES, "little")], list(descriptors))
        self.end.sendall(body)

    def receive(self) -> tuple[Any, list[int]]:
        """Receive the next message and its descriptors, which the receiver must close.

        Raises:
            ConnectionError: the other process is gone.
        """
        header, descriptors, _, _ = socket.recv_fds(self.end, HEADER_BYTES, 8, socket.MSG_WAITALL)
        if len(header) < HEADER_BYTES:
            raise ConnectionResetError("the other end of the channel is closed")
        size = int.from_bytes(header, "little")
        body = self.end.recv(size, socket.MSG_WAITALL)
        if len(body) < size:
            raise ConnectionResetError(f"the channel closed after {len(body)} of {size} bytes of a message")
        return msgspec.msgpack.decode(body), descriptors
