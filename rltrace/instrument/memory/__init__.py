"""The memory ledger's sources: who holds which bytes of a GPU or of a host, and whose each allocation is.

In: models, optimizers and pools that hooks have met, the allocator of torch, NVML and the kernel. Out: at every phase
boundary one sample for each owner, and beside them the driver's totals, so that `analysis/ledger.py` can set one
against the other; on chosen steps, an owner for every allocation. No row is made by subtraction.

`sharded_models.py` knows which tensors are whose, `named_models.py` whose a trainer's models are, `work.py` whose model
is made or computed now, and `engine_share.py` what an engine has allocated beside a trainer. `cuda_ledger.py` and
`process_ledger.py` are the ledgers of a GPU and of a CPU's process, and `cards.py` are the GPUs that the first asks.
`unchanged.py` stamps each of their samples with how long nothing had changed, so that a reader knows which samples are
of one moment.

`cuda_memory.py` tells the ledger when a phase begins or ends, `turn_hooks.py` where memory turns in between, of which
`turns.py` chooses what is worth a look; `pools.py` are pools that sleep; `growth.py` gives owners what a process grows
by in calls, outside of torch's allocator; `uncaught_errors.py` looks once more before a process dies of an error about
memory.

`allocation_owners.py` names allocations. `chosen_allocations.py` keeps those of the steps of `RLTRACE_ALLOCATIONS`, and
`engine_allocations.py` does the same for engines.

To add an owner, name it in `OWNERS` and `OWNER_COLORS` of `events.py`, and measure it where its bytes come into being:
tensors of a model in `by_owner` of `sharded_models.py`, all else on a GPU in `CudaLedger.rows`. Its row in
`docs/memory-ledger.md` says how.
"""
