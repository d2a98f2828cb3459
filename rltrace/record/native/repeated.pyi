"""What `repeated.c` makes; see there."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

SOURCE: int

def use(spans: ModuleType, running_loop: Callable[[], Any], /) -> None: ...
def forget() -> None: ...

class Writer:
    used_bytes: int
    def __new__(cls, owner: object, address: int, room_bytes: int, /) -> Writer: ...
    def write(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...

class Calls:
    def __new__(
        cls,
        gate: object,
        starts_ns: list[int],
        kind: Callable[[], int],
        kind_address: int,
        slow: Callable[[int], None],
        /,
    ) -> Calls: ...
    def after(self) -> None: ...
    def know(self, head: bytes, first: bytes, second: bytes, count: Callable[[], object], /) -> None: ...

class Stretch:
    said: Any
    head: bytes
    tail: bytes
    parts: int
    left: int
    start_ns: int
    def __new__(cls, said: object, parts: int, /) -> Stretch: ...

class StretchEnd:
    def __new__(cls, known: dict[int, Any], slow: Callable[..., None], /) -> StretchEnd: ...
    def begin(self, of: object, /) -> None: ...
    def end(self, of: object, /) -> None: ...
    def know(self, count: Callable[[], object], /) -> None: ...
