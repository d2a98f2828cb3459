"""torchvision, of which PyPI has builds for CUDA's torch only; SGLang imports it for models that see."""

import absent

absent.stand_in(__name__)
