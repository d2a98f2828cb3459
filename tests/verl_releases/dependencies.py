"""What every release of verl imports, without verl: programs of all releases are forked from a Python that has it."""

import datasets  # noqa: F401
import fastapi  # noqa: F401
import peft  # noqa: F401
import ray.util.state  # noqa: F401
import tensordict  # noqa: F401
import torch  # noqa: F401
import transformers.modeling_utils  # noqa: F401
