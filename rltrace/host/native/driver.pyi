"""What `driver.c` makes; see there."""

SOURCE: int

def memory_of(function: int, device: int, /) -> tuple[int, int, int, int]: ...
