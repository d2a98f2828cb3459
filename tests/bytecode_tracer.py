"""Interrupts code of ours at its n-th bytecode, as a signal handler does and as another thread does."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SOURCE = r"""
#include <Python.h>
#include <frameobject.h>
#include <string.h>

static const char *folder;       /* of the files whose bytecodes count */
static long bytecodes, wanted;   /* passed, and where to interrupt */
static PyObject *function;       /* called as a signal handler is, or NULL */
static PyObject *error;          /* else the class to set as PyThreadState_SetAsyncExc does */

static int is_ours(PyFrameObject *frame) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    const char *file = PyUnicode_AsUTF8(code->co_filename);
    Py_DECREF(code);
    return file && !strncmp(file, folder, strlen(folder));
}

static int trace(PyObject *self, PyFrameObject *frame, int what, PyObject *arg) {
    if (!is_ours(frame)) return 0;
    if (what == PyTrace_CALL) return PyObject_SetAttrString((PyObject *)frame, "f_trace_opcodes", Py_True);
    if (what != PyTrace_OPCODE || ++bytecodes != wanted) return 0;
    PyEval_SetTrace(NULL, NULL);
    if (error) {
        PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), error);
        return 0;
    }
    PyObject *result = PyObject_CallFunction(function, "iO", 14, frame);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static PyObject *start(PyObject *self, PyObject *args) {
    if (!PyArg_ParseTuple(args, "slOO", &folder, &wanted, &function, &error)) return NULL;
    if (error == Py_None) error = NULL;
    bytecodes = 0;
    PyEval_SetTrace(trace, Py_None);
    Py_RETURN_NONE;
}

static PyObject *stop(PyObject *self, PyObject *args) {
    PyEval_SetTrace(NULL, NULL);
    return PyBool_FromLong(bytecodes >= wanted);
}

static PyMethodDef methods[] = {{"start", start, METH_VARARGS, ""}, {"stop", stop, METH_NOARGS, ""}, {0}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "bytecode_interrupter", NULL, -1, methods};
PyMODINIT_FUNC PyInit_bytecode_interrupter(void) { return PyModule_Create(&module); }
"""


def build(folder: Path) -> Any:
    """The extension module: `start(folder, n, function, error)`, and `stop()`: whether it has interrupted."""
    source = folder / "bytecode_interrupter.c"
    source.write_text(SOURCE)
    library = folder / f"bytecode_interrupter{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_path("include")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", f"-I{include}", str(source), "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location("bytecode_interrupter", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["bytecode_interrupter"] = module
    return module


def in_a_thread(work: Callable[[], None]) -> None:
    """Run it in a thread of its own: an error at the very end of an `except` clause stays the one that is handled."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
