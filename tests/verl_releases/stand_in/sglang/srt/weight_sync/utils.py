"""What sends one bucket, with the face of SGLang's: it makes a request of the tensors, and hands it to the engine."""

import pickle
from types import SimpleNamespace


async def update_weights(engine, params_batch, device_mesh_key, device_mesh, load_format=None):
    """Of one rank alone. In the place of handles are the tensors' names and shapes."""
    handles = pickle.dumps([(name, tuple(tensor.shape)) for name, tensor in params_batch])
    request = SimpleNamespace(serialized_named_tensors=[handles], load_format=load_format, flush_cache=True)
    return await engine.update_weights_from_tensor(request)


def _preprocess_tensor_for_update_weights(tensor):
    return tensor
