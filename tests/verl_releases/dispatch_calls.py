"""Calls a real worker group of the installed verl every way that it dispatches, on 2 CPU workers."""

import asyncio

import ray
import verl
from tiny_worker import TinyWorker
from verl import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.utils.debug import marked_timer


def synchronize(group):
    """The driver's side of a weight sync, which verl lets callers await or not."""
    from verl.checkpoint_engine.base import CheckpointEngineManager

    manager = object.__new__(CheckpointEngineManager)
    manager.backend, manager.replicas = "naive", []
    manager.trainer = manager.actor_wg = group
    manager.update_weights(global_steps=3)

    async def awaits():
        await manager.sleep_replicas()

    asyncio.run(awaits())


@ray.remote
class TrainerOfAScript:
    """A trainer that Ray sends by value, for its class is not in a module: as that of verl 0.8's `main_ppo_sync`."""

    def __init__(self, first):
        self.global_steps = first

    def train(self):
        for _ in range(2):
            with marked_timer("step", {}), marked_timer("gen", {}):
                self.global_steps += 1
        return self.global_steps


def main():
    import torch

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, max_colocate_count=1)
    workers = {"tiny": RayClassWithInitArgs(ray.remote(TinyWorker), base=10)}
    colocated = create_colocated_worker_cls(workers)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=colocated, device_name="cpu")
    tiny = group.spawn(prefix_set=workers.keys())["tiny"]
    x = torch.arange(4, dtype=torch.float32).reshape(4, 1)
    print(tiny.add(DataProto.from_dict(tensors={"x": x})).batch["sum"].flatten().tolist())
    line = int(verl.__version__.split(".")[1])
    if line >= 6:
        assert len(tiny.add_over_mesh(DataProto.from_dict(tensors={"x": x}))) == 4
    print(tiny.whoami())
    print(ray.get(tiny.later(5)))
    try:
        tiny.fail()
    except KeyError as error:
        print("KeyError", "theirs" in str(error))
    print(type(tiny.add).__name__)
    if line >= 7:
        synchronize(tiny)
    if line >= 8:
        assert ray.get(TrainerOfAScript.remote(5).train.remote()) == 7
    ray.shutdown()


main()
