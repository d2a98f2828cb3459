"""How packed sequences are gathered."""


def all_gather(*_):
    """Nobody asks for it."""
    raise NotImplementedError
