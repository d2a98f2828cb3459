"""Hooks on the callbacks of vLLM's allocator, which its extension calls until the interpreter is gone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

EXTENSION = """
    #include <Python.h>
    static PyObject *callback;
    static PyObject *hold(PyObject *self, PyObject *function) { callback = function; Py_RETURN_NONE; }
    typedef struct { PyObject_HEAD } Pool;
    static void freed(PyObject *pool) {
        PyObject *result = PyObject_CallFunction(callback, "i", 7);
        if (result) Py_DECREF(result); else PyErr_Clear();
        Py_TYPE(pool)->tp_free(pool);
    }
    static PyTypeObject PoolType = {
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "borrowing.Pool", .tp_basicsize = sizeof(Pool),
        .tp_flags = Py_TPFLAGS_DEFAULT, .tp_new = PyType_GenericNew, .tp_dealloc = freed,
    };
    static PyMethodDef methods[] = {{"hold", hold, METH_O, 0}, {0}};
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "borrowing", 0, -1, methods};
    PyMODINIT_FUNC PyInit_borrowing(void) {
        PyObject *made = PyModule_Create(&module);
        if (PyType_Ready(&PoolType) < 0) return NULL;
        PyModule_AddObject(made, "Pool", (PyObject *)&PoolType);
        return made;
    }
"""
"""As csrc/cumem_allocator.cpp: a callback whose reference is not counted, called whenever a pool is freed."""

ALLOCATOR = """
    import borrowing

    class CuMemAllocator:
        instance = None
        pointer_to_data = {}
        def __init__(self):
            self.pointer_to_data = {7: None}
            self.allocator_and_pools = {}
            self.python_malloc_callback = self._python_malloc_callback
            self.python_free_callback = self._python_free_callback
        def _python_malloc_callback(self, allocation_handle):
            pass
        def _python_free_callback(self, ptr):
            return self.pointer_to_data.pop(ptr, None)
        def use_memory_pool(self):
            borrowing.hold(self.python_free_callback)
            self.allocator_and_pools["weights"] = borrowing.Pool()

    class AllocationData:
        handle = ()
        tag = ""

    def create_and_map(allocation_handle):
        pass
    unmap_and_release = create_and_map
"""
"""What vLLM's device_allocator/cumem.py has around it."""

PROGRAM = """
    import gc, sys
    from rltrace.instrument.vllm import allocations as vllm_allocations
    from rltrace.hooks.hook import NOBODY
    from rltrace.hooks.patching import PatchSet

    class Register:
        def hook(self, *args):
            return NOBODY

    if sys.argv[1] == "uncounted":
        hooks = sys.modules["rltrace.hooks.wrapping"]
        hooks.wrap_borrowed = hooks.wrap_same_kind
        del hooks  # what the program still names is emptied later than its pools are freed
    if sys.argv[1] != "bare":
        vllm_allocations.patches = patches = PatchSet("vllm_allocations", Register())
        vllm_allocations.name_hooks(patches)
        import vllm.device_allocator.cumem
        states = {hook.target: hook.state for hook in patches.hooks if "callback" in hook.target}
        assert set(states.values()) == {"installed"}, states
    from vllm.device_allocator import cumem
    allocator = cumem.CuMemAllocator.instance = cumem.CuMemAllocator()
    allocator.use_memory_pool()
    # Cycles such as all modules of a framework are in: only the collector ends them, when the interpreter ends.
    sys.modules["framework"] = framework = type(sys)("framework")
    framework.cumem, cumem.framework, cumem.CuMemAllocator.module = cumem, framework, cumem
    gc.collect()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program beside an allocator whose extension is compiled."""
    compiler, headers = shutil.which("cc"), sysconfig.get_paths()["include"]
    if compiler is None or not (Path(headers) / "Python.h").exists():
        pytest.skip("no C compiler, or no headers of this Python")
    folder = tmp_path_factory.mktemp("borrowing")
    package = folder / "vllm" / "device_allocator"
    package.mkdir(parents=True)
    for init in (package / "__init__.py", package.parent / "__init__.py"):
        init.touch()
    for path, source in (
        (package / "cumem.py", ALLOCATOR),
        (folder / "borrowing.c", EXTENSION),
        (folder / "program.py", PROGRAM),
    ):
        path.write_text(textwrap.dedent(source))
    words = [compiler, "-shared", "-fPIC", f"-I{headers}", "borrowing.c", "-o", "borrowing.so"]
    subprocess.run(words, cwd=folder, check=True, timeout=120)
    return folder / "program.py"


def end_of(program: Path, hooks: str) -> int:
    """How the program's interpreter ends with its callbacks hooked in this way."""
    return subprocess.run([sys.executable, str(program), hooks], check=False, timeout=120).returncode


def test_pools_outlive_modules(program: Path) -> None:
    """A program whose pools outlive its modules ends as it does without hooks."""
    assert end_of(program, "bare") == 0
    assert end_of(program, "hooked") == 0


def test_uncounted_callback_kills(program: Path) -> None:
    """A callback whose reference nobody counts would have killed the program.

    Else the promise above is kept by chance.
    """
    assert end_of(program, "uncounted") == -11
