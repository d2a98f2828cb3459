"""A placeholder: verl imports SGLang at the head of the modules in which it is hooked."""

import os

import absent

__version__ = os.environ["SGLANG_VERSION"]

absent.stand_in(__name__, absent.WithClasses)
