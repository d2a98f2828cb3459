"""Calls by name over a channel: a method `on_NAME` answers each, with its result or with the one line of its error."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rltrace.errors import RunError
from rltrace_reference.channel import Channel
from rltrace_reference.engine.last_words import last_words


class Calls:
    """Answers the calls of another process."""

    rank = 0
    """Whose engine this is, for errors."""

    def serve(self, channel: Channel) -> None:
        """Answer calls until the other process asks for the end.

        Raises:
            ConnectionError: it closed the channel.
        """
        while self.answer(channel):
            pass

    def answer(self, channel: Channel) -> bool:
        """Answer the next call; return whether another one may come.

        Raises:
            ConnectionError: the other process closed the channel.
        """
        message, descriptors = channel.receive()
        name = message.pop("call")
        if name == "exit":
            return False
        try:
            channel.send({"result": self.call(name, message, descriptors)})
        except RunError as error:
            channel.send({"error": str(error)})
        except Exception as error:
            channel.send({"error": self.one_line(error)})
        return True

    def call(self, name: str, arguments: dict[str, Any], descriptors: list[int]) -> Any:
        """Return the result of a call; descriptors come with a bucket alone, whose receiver closes them."""
        if name == "bucket":
            arguments["descriptors"] = descriptors
        return getattr(self, f"on_{name}")(**arguments)

    def one_line(self, error: Exception) -> str:
        """Return what went wrong in the engine's own code; all of it goes to this process's log."""
        traceback.print_exc()
        return f"engine of rank {self.rank}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"


class Elsewhere:
    """Calls that another process answers."""

    def __init__(self, channel: Channel, in_time: Callable[[str], AbstractContextManager[None]]) -> None:
        """Args:
        channel: To that process.
        in_time: Returns the context in which a call has to end in time, by its name.
        """
        self.channel, self.in_time = channel, in_time

    def call(self, name: str, arguments: dict[str, Any], descriptors: list[int]) -> Any:
        """Return what the other process answers; the descriptors are its own then.

        Raises:
            RunError: it failed, or is gone.
        """
        try:
            with self.in_time(name):
                self.channel.send({"call": name} | arguments, tuple(descriptors))
                for descriptor in descriptors:
                    os.close(descriptor)
                answer, _ = self.channel.receive()
        except ConnectionError as error:
            said = last_words(sys.stderr.fileno())
            raise RunError(f"{name}: {error}: the process with the engine's weights is gone; it said: {said}") from None
        if answer.get("error"):
            raise RunError(answer["error"])
        return answer["result"]
