"""What takes minutes: damage by the thousand. `make test-hostile` runs it, `make test` does not."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "rltrace"))  # `mutations`, which the suite uses too
