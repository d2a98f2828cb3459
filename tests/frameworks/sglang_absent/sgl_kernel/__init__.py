"""SGLang's kernels, which come for GPUs only; on a CPU without AMX it takes torch's functions instead."""

import absent

absent.stand_in(__name__)
