"""A loop that marks no steps, and a process that does something for it in each."""

from __future__ import annotations

from textwrap import dedent, indent

_LOOP = """\
import os
import rltrace
to_helper, to_loop = os.pipe(), os.pipe()
import torch
if child := os.fork():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range({steps}):
        loss = None if {asks_first} else model(torch.ones(3, 8)).sum()
        os.write(to_helper[1], b"1")
        os.read(to_loop[0], 1)
        loss = model(torch.ones(3, 8)).sum() if loss is None else loss
        loss.backward()
        optimizer.step()
    os.waitpid(child, 0)
else:
{start}
    for number in range({steps}):
        os.read(to_helper[0], 1)
{help}
        os.write(to_loop[1], b"1")
"""


def helped_loop(steps: int, work: str, start: str = "", *, asks_first: bool = False) -> str:
    """Return the program.

    Args:
        steps: How many steps the loop has.
        work: What the helper does in each, whose `number` it knows.
        start: What it does before.
        asks_first: Whether the loop asks for it before its step begins, and not in the middle.
    """
    begin, each = indent(dedent(start), " " * 4), indent(dedent(work), " " * 8)
    return _LOOP.format(steps=steps, start=begin, help=each, asks_first=asks_first)
