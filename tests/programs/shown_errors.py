"""What a program can see of an exception: printed, so that two runs of it can be compared."""

import sys
import traceback


def show_error(error):
    """Print an exception, the frames that it went through, and what it came of."""
    while error is not None:
        print(type(error).__qualname__, error)
        for frame in traceback.extract_tb(error.__traceback__):
            print("    frame", frame.filename, frame.name)
        print("    now handled:", type(sys.exc_info()[1]).__name__)
        error = error.__cause__ or error.__context__
