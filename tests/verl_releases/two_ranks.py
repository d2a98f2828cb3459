"""Two ranks of the installed verl exchange what ranks do around a phase, over gloo on a CPU.

Usage: two_ranks.py RECORDING
"""

import os
import sys
import tempfile
from types import SimpleNamespace

import real_calls
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl import DataProto

import rltrace
from rltrace.hooks.installation import install
from rltrace.record import spans

RANKS = 2
LINE = real_calls.LINE


def batch():
    """Two sequences of this rank's."""
    return DataProto.from_dict(tensors={"input_ids": torch.arange(8).reshape(2, 4) + 8 * dist.get_rank()})


def ulysses_resharding(mesh):
    """The batch of both ranks on each, and each one's own again."""
    if LINE >= 8:
        from verl.utils.ulysses import FSDPUlyssesShardingManager
    else:
        from verl.workers.sharding_manager.fsdp_ulysses import FSDPUlyssesShardingManager
    manager = FSDPUlyssesShardingManager(mesh)
    with manager:
        both = manager.preprocess_data(batch())
        assert len(both) == 4
        assert torch.equal(manager.postprocess_data(both).batch["input_ids"], batch().batch["input_ids"])
    FSDPUlyssesShardingManager(None).preprocess_data(batch())  # of a rank alone: nothing moves


def ulysses_attention(mesh):
    """Heads for parts of a sequence, and back, with their gradients."""
    from verl.utils import ulysses

    ulysses.set_ulysses_sequence_parallel_group(mesh["sp"].get_group())
    x = torch.randn(1, 4, 2, 8, requires_grad=True)  # B, T / 2, N, H
    heads = ulysses.gather_seq_scatter_heads(x, seq_dim=1, head_dim=2)
    assert heads.shape == (1, 8, 1, 8)
    back = ulysses.gather_heads_scatter_seq(heads, head_dim=2, seq_dim=1)
    assert torch.equal(back, x)
    back.sum().backward()
    ulysses.set_ulysses_sequence_parallel_group(None)


def resharding_of_an_engine():
    """The batch of a TP group on each of its ranks, and each one's own again."""
    from verl.workers.sharding_manager import fsdp_vllm

    group = SimpleNamespace(device_group=dist.group.WORLD)
    fsdp_vllm.vllm_ps = SimpleNamespace(get_tensor_model_parallel_group=lambda: group)
    manager = object.__new__(fsdp_vllm.FSDPVLLMShardingManager)
    manager.tp_size, manager.tp_rank = RANKS, dist.get_rank()
    both = manager.preprocess_data(batch())
    assert len(both) == 4
    assert torch.equal(manager.postprocess_data(both).batch["input_ids"], batch().batch["input_ids"])


def first_weights():
    """What rank 0 has loaded, as each rank's shards."""
    from verl.utils.fsdp_utils import fsdp2_load_full_state_dict

    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    full = model.state_dict()
    model = fully_shard(model)
    fsdp2_load_full_state_dict(model, full if dist.get_rank() == 0 else {})


def an_adapter():
    """A LoRA adapter, gathered at once and layer by layer."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl.utils import fsdp_utils

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_key_value_heads=2, **shape))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    model = fully_shard(model)
    fsdp_utils.layered_summon_lora_params(model)
    if LINE >= 6:
        assert len(fsdp_utils.collect_lora_params(model, False, True)) == 8


def a_rollout_of_transformers():
    """HF's `generate` as verl's rollout."""
    from omegaconf import OmegaConf
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl.workers.rollout.hf_rollout import HFRollout

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_key_value_heads=2, **shape))
    said = {"do_sample": True, "temperature": 1.0, "response_length": 4, "top_p": 1.0, "top_k": 0, "n": 1}
    prompts = torch.ones(2, 3, dtype=torch.long)
    data = DataProto.from_dict(
        tensors={"input_ids": prompts, "attention_mask": prompts, "position_ids": torch.arange(3).repeat(2, 1)},
        meta_info={"eos_token_id": 0, "pad_token_id": 0},
    )
    rollout = HFRollout(model, OmegaConf.create(said))
    assert rollout.generate_sequences(data).batch["responses"].shape == (2, 4)


def main(rank, folder, rendezvous):
    """Make the calls of one rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    rltrace.start(folder, role="worker", rank=rank)
    install(spans.current(), ["verl"])
    real_calls.use_cpu()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "sp"))
    ulysses_resharding(mesh)
    ulysses_attention(mesh)
    if LINE <= 5:
        resharding_of_an_engine()
    first_weights()
    an_adapter()
    if LINE <= 5:  # later its base has methods that it lacks
        a_rollout_of_transformers()
    dist.destroy_process_group()
    rltrace.stop()


if __name__ == "__main__":
    # Forked: each would import verl and transformers anew, which takes longer than all that they do.
    with tempfile.TemporaryDirectory() as made:
        arguments = sys.argv[1], f"{made}/rendezvous"
        torch.multiprocessing.start_processes(main, arguments, nprocs=RANKS, start_method="fork")
