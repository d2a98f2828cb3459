"""A placeholder: verl imports vLLM at the head of the modules in which it is hooked.

Nothing of vLLM works here. What verl's hooks do beneath vLLM is another test's business.
"""

from importlib import metadata

import absent

__version__ = metadata.version("vllm")  # of an empty distribution that the test makes

absent.stand_in(__name__, absent.WithClasses)
