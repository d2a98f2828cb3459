"""A backend `cpu` of Triton, which its wheels lack: vLLM's newer model runner asks whether there is one.

Nothing is compiled for it. With TRITON_INTERPRET=1 the kernels run in Triton's own interpreter.
"""


def take_masks_of_any_type():
    """Give the interpreter's loads their masks as booleans; a plug-in of vLLM, which is called in each process.

    Triton compiles `where & (count > 0)` to booleans. Its interpreter keeps integers, and refuses them as a mask.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load = InterpreterBuilder.create_masked_load

    def create_masked_load(self, pointers, mask, *rest):
        return load(self, pointers, TensorHandle(mask.data.astype(bool), mask.dtype), *rest)

    InterpreterBuilder.create_masked_load = create_masked_load
