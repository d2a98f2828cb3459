"""Takes a Python command apart: the interpreter's options, and what is run."""

from __future__ import annotations

import re

PYTHON = re.compile(r"(?:python|pypy)[0-9.]*[dt]?")
"""File names of interpreters."""


def python_options(command: list[str]) -> str:
    """Return the letters of the options that the interpreter itself is given."""
    return _parsed(command)[0]


def words_of_program(command: list[str]) -> list[str]:
    """Return what follows the interpreter and its options: `-m`, a module and its words; a script and its words; `-c`
    ..."""
    return _parsed(command)[1]


def _parsed(command: list[str]) -> tuple[str, list[str]]:
    """Return the letters of the interpreter's own options, and the words after them; `-c` and `-m` keep what is
    theirs."""
    letters = ""
    words = command[1:]
    while words and words[0].startswith("-") and words[0] != "-" and not words[0].startswith("--"):
        word = words.pop(0)
        for at, letter in enumerate(word[1:], 1):
            rest = word[at + 1 :]
            if letter in "cm":
                return letters, [f"-{letter}", *([rest] if rest else []), *words]
            if letter in "WX":  # the rest is its value, or the next word
                words = words if rest else words[1:]
                break
            letters += letter
    return letters, words
