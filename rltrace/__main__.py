"""The command, as `rltrace` and as `python -m rltrace` where that is not on the PATH."""

from __future__ import annotations

from rltrace.dependencies import put_installed_first
from rltrace.host.garbage_collector import without_collection


def main(prog_name: str | None = None) -> None:
    """Run it; what the user's program has under the name of a package that we need is not for us."""
    put_installed_first()
    with without_collection():  # what is imported stays
        from rltrace.cli import leaving, main

    try:
        main(prog_name=prog_name)
    except SystemExit as exit_:
        leaving.at_once(exit_.code)
        raise


if __name__ == "__main__":
    main("python -m rltrace")
