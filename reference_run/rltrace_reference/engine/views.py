"""A checkpoint's parameters where the engines of others keep them: fused, and with a padded vocabulary."""

from __future__ import annotations

from torch import Tensor

from rltrace.errors import RunError
from rltrace_reference.config import ModelConfig
from rltrace_reference.engine.model import matrices


def checkpoint_views(fused: dict[str, Tensor], config: ModelConfig, engine: str) -> dict[str, Tensor]:
    """Return the parameters of a checkpoint as rows of an engine's.

    Args:
        fused: The engine's parameters by its names, at tensor parallelism 1.
        config: Sizes.
        engine: Its name, for errors.

    Raises:
        RunError: it has another set of parameters, or other sizes.
    """
    views: dict[str, Tensor] = {}
    expected = matrices(config)
    unknown = sorted(set(fused) - set(expected))
    for name, members in expected.items():
        matrix = fused.get(name)
        rows = sum(shape[0] for shape in members.values())
        if matrix is None or len(matrix) < rows or unknown:
            has = "none" if matrix is None else f"shape {tuple(matrix.shape)}"
            raise RunError(
                f"{engine}: the model needs {name} with {rows} rows, {engine} has {has}"
                + (f", and parameters unknown here: {unknown[0]}" if unknown else "")
            )
        parts = matrix.detach()[:rows].split([shape[0] for shape in members.values()])
        views |= dict(zip(members, parts, strict=True))
    return views
