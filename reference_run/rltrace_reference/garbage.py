"""Keeps Python's garbage collector from looking at all objects again and again: at start-up, or in a step."""

from __future__ import annotations

import gc


def pause() -> None:
    """Collect nothing until `freeze`; call this before a process imports torch.

    What an import makes stays. To look through it while more and more of it comes takes a fifth of a start-up.
    """
    gc.disable()


def freeze() -> None:
    """Collect now, and leave everything that is alive out of all later collections; call this when a process is set up.

    A full collection looks at the 0.3 million containers of torch and Ray for 0.2 s, several times in ten steps, and in
    the next collective the other ranks wait for the one that collects. Later garbage is still collected.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
