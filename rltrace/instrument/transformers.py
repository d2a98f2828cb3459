"""transformers: a call of `generate` is a rollout, whatever program makes it.

Read and called: transformers 5.24, generation/utils.py. Of the call only its public arguments and its result are used.
"""

from __future__ import annotations

from typing import Any

from rltrace.events import GENERATE
from rltrace.hooks.arguments import argument
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.torch.generation import begin_generation, end_generation

GENERATION = "transformers.generation.utils:GenerationMixin"


class Transformers:
    """Makes each generation a span."""

    name = "transformers"
    supports = ("transformers >= 4.40",)

    def install(self, patches: PatchSet) -> None:
        """Name the hook."""
        patches.around(f"{GENERATION}.generate", begin, end, (GENERATE,))


def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the span; the forwards inside of it are its own."""
    given = argument("inputs", 1, args, kwargs, None)
    shape = getattr(kwargs.get("input_ids") if given is None else given, "shape", None)
    said = {"sequences": int(shape[0]), "prompt_tokens": int(shape[1])} if shape is not None and len(shape) == 2 else {}
    return begin_generation("transformers", args[0], **said)


def end(opened: Any, result: Any, error: BaseException | None) -> None:
    """Close the span with the length of what came out, prompts included."""
    shape = getattr(getattr(result, "sequences", result), "shape", None)
    said = {"tokens": int(shape[1])} if error is None and shape is not None and len(shape) == 2 else {}
    end_generation(opened, error, **said)
