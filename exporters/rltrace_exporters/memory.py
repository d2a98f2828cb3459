"""Writes the picture of a run's memory: one step of each device as stacked areas, and each phase as a bar.

The HTML file has everything in it and works without the internet; the SVG and PNG are the same picture, for a page.
"""

from __future__ import annotations

from typing import BinaryIO, Protocol

from rltrace.errors import MissingExtraError, OutputError
from rltrace.read.recording import Recording
from rltrace_exporters.memory_picture import Picture, picture


class Memory:
    """The format of `--to memory`; the end of the file's name says which kind of file."""

    suffix = ".html"
    suffixes = (".html", ".svg", ".png")
    shows_spans = False

    def __init__(self, suffix: str = ".html") -> None:
        self._suffix = suffix

    def for_file(self, name: str) -> Memory:
        """The exporter of a file.

        Raises:
            OutputError: its name ends in none of the kinds.
        """
        for suffix in self.suffixes:
            if name == "-" or name.endswith(suffix):
                return Memory(suffix)
        raise OutputError(f"{name}: a picture of memory is a file of {', '.join(self.suffixes)}; name one with -o")

    def write(self, recording: Recording, out: BinaryIO) -> None:
        """Draw every device whose owners' bytes were sampled.

        Raises:
            OutputError: there are none.
            MissingExtraError: what draws them is not installed.
        """
        drawn = picture(recording)
        if not drawn.devices:
            raise OutputError(f"{recording.path}: no process sampled who holds its memory, so there is nothing to draw")
        try:
            draw = _drawer(self._suffix)
        except ImportError as error:
            raise MissingExtraError(
                f"a picture of memory as {self._suffix} needs {error.name}, which is not installed here", "pictures"
            ) from None
        out.write(draw(drawn))


class Drawer(Protocol):
    """Draws a picture as one kind of file."""

    def __call__(self, drawn: Picture) -> bytes:
        """The file."""


def _drawer(suffix: str) -> Drawer:
    # Each needs a library of its own, and a second to import it.
    if suffix == ".html":
        from rltrace_exporters.memory_html import draw

        return draw
    from rltrace_exporters.memory_image import draw_as

    return lambda drawn: draw_as(drawn, suffix.removeprefix("."))
