"""A small worker for verl's real worker group: methods of every kind that verl dispatches, on a CPU."""

from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register

try:  # verl 0.6 and newer
    from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn

    OVER_MESH = make_nd_compute_dataproto_dispatch_fn(mesh_name="tiny")
except ImportError:
    OVER_MESH = Dispatch.ONE_TO_ALL


class TinyWorker(Worker):
    """Methods registered as verl's own are."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        if OVER_MESH is not Dispatch.ONE_TO_ALL:  # both ranks compute the same chunk
            self._register_dispatch_collect_info("tiny", dp_rank=0, is_collect=self.rank == 0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        return DataProto.from_dict(tensors={"sum": data.batch["x"] + self.base})

    @register(dispatch_mode=OVER_MESH)
    def add_over_mesh(self, data):
        return DataProto.from_dict(tensors={"sum": data.batch["x"] + self.base})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whoami(self):
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def later(self, n):
        return n + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self):
        raise KeyError("theirs")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode=None):
        return global_steps
