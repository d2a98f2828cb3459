"""Rewrites the asserts of every test as pytest does, once, and leaves the result where pytest looks for it.

Every worker of pytest-xdist imports every test. Where PYTHONDONTWRITEBYTECODE is set, none of them keeps what it has
rewritten, and each rewrites them all. The functions of pytest are private ones: should they go, only time is lost.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite

HERE = Path(__file__).parent
OF_PLUGINS = ("hypothesis", "anyio")
"""Packages with a plug-in of pytest's that tests import: pytest rewrites all of their files."""

private: Any = rewrite


def files() -> list[Path]:
    """Return the files that pytest rewrites."""
    own = [path for pattern in ("test_*.py", "conftest.py") for path in HERE.rglob(pattern)]
    found = [importlib.util.find_spec(name) for name in OF_PLUGINS]
    packages = [Path(spec.origin).parent for spec in found if spec is not None and spec.origin is not None]
    return [*own, *(path for package in packages for path in package.rglob("*.py"))]


def keep(path: Path) -> None:
    """Rewrite a file, unless that was done since it was changed."""
    pyc = private.get_cache_dir(path) / (path.stem + private.PYC_TAIL)
    if private._read_pyc(path, pyc) is None:
        private.try_makedirs(pyc.parent)
        version, code = private._rewrite_test(path, None)
        private._write_pyc(SimpleNamespace(trace=print), code, version, pyc)


def main() -> None:
    """Rewrite all of them, on every core."""
    with ProcessPoolExecutor() as pool:
        try:
            list(pool.map(keep, files(), chunksize=8))
        except (AttributeError, TypeError, ValueError) as error:
            print(f"the asserts are rewritten by every worker: {error}")


if __name__ == "__main__":
    main()
