"""verl: the phases of its steps, its weight sync bucket by bucket, its dispatch, its rollout, with no edit to it.

In: verl's trainers, worker groups, workers, checkpoint engines, agent loops and servers. Out: the steps and phases of
the driver and of each rank, `ray.dispatch`, `ray.execute`, `ray.collect`, the buckets of a weight sync, and requests.

`hook_points.py` is a table of which place is hooked in which release. What a hook does is in the file that is named for
its part of verl. To add a hook, add a row there and a function here; to add a release, extend the rows that it has too.

Source read: the wheels of verl 0.4.1, 0.5.0, 0.6.1, 0.7.1, 0.8.0 and 0.9.1.
"""

from __future__ import annotations

from rltrace.hooks.patching import PatchSet
from rltrace.instrument.verl.hook_points import HOOK_POINTS, LAST


class Verl:
    """Records the driver, workers, weight sync and rollout of the release that is installed."""

    name = "verl"
    supports = ("verl >= 0.4.1",)

    def install(self, patches: PatchSet) -> None:
        """Wait until verl is imported: its release is known only then, and none of its parts is imported before."""
        patches.when_imported("verl", lambda _: name_hooks(patches))


def name_hooks(patches: PatchSet) -> None:
    """Name the hooks of the release that was just imported."""
    import verl

    line = release_line(verl.__version__)
    for point in HOOK_POINTS:
        if point.is_in(line):
            point.name_hook(patches, point.target)


def release_line(version: str) -> int:
    """Return the line of a release: 9 for "0.9.1". A newer one than was read has what the last one has, or says not."""
    major, minor = version.split(".")[:2]
    return LAST if int(major) else min(int(minor), LAST)
