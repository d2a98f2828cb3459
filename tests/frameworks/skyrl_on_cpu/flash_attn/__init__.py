"""flash-attn, whose kernels are compiled for GPUs only: the names that OpenRLHF imports for packed sequences.

Nobody packs any here. What it looks for besides is not found, and it takes torch's functions instead.
"""
