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

from rltrace.host.garbage_collector import without_collection

SOURCE = r"""
#include <Python.h>
#include <frameobject.h>
#include <string.h>

static const char *folder;       /* of the files whose bytecodes count */
static long bytecodes, wanted;   /* passed, and where to interrupt */
static PyObject *function;       /* called as a signal handler is, or NULL */
static PyObject *error;          /* else the class to set as PyThreadState_SetAsyncExc does */

static int is_ours(PyCodeObject *code) {
    const char *file = PyUnicode_AsUTF8(code->co_filename);
    return file && !strncmp(file, folder, strlen(folder));
}

static int interrupt(void) {
    if (error) {
        PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), error);
        return 0;
    }
    PyObject *result = PyObject_CallFunction(function, "iO", 14, (PyObject *)PyEval_GetFrame());
    Py_XDECREF(result);
    return result ? 0 : -1;
}

#if PY_VERSION_HEX >= 0x030c0000  /* its trace functions miss bytecodes of what was called before */

static unsigned long thread;

static PyObject *monitoring(void) {
    return PySys_GetObject("monitoring");
}

/* The callback of an event: the code, and the offset of the bytecode in it. */
static PyObject *at_bytecode(PyObject *self, PyObject *args) {
    PyCodeObject *code;
    int offset;
    if (!PyArg_ParseTuple(args, "Oi", &code, &offset)) return NULL;
    if (!is_ours(code)) return PyObject_GetAttrString(monitoring(), "DISABLE");
    if (PyThread_get_thread_ident() == thread && ++bytecodes == wanted && interrupt()) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef callback = {"at_bytecode", at_bytecode, METH_VARARGS, ""};

static int watch(int is_on) {
    const int tool = 3;
    PyObject *events = PyObject_GetAttrString(monitoring(), "events"), *name = NULL, *done[5] = {0};
    PyObject *event = events ? PyObject_GetAttrString(events, "INSTRUCTION") : NULL;
    PyObject *called = is_on ? PyCFunction_New(&callback, NULL) : Py_NewRef(Py_None);
    if (event && called) {
        name = PyObject_CallMethod(monitoring(), "get_tool", "i", tool);
        if (name == Py_None) done[0] = PyObject_CallMethod(monitoring(), "use_tool_id", "is", tool, "interrupter");
        done[1] = PyObject_CallMethod(monitoring(), "register_callback", "iOO", tool, event, called);
        if (is_on) done[2] = PyObject_CallMethod(monitoring(), "restart_events", NULL);
        done[3] = PyObject_CallMethod(monitoring(), "set_events", "iO", tool, is_on ? event : Py_False);
    }
    int code = done[3] ? 0 : -1;
    for (int i = 0; i < 5; i++) Py_XDECREF(done[i]);
    Py_XDECREF(name); Py_XDECREF(called); Py_XDECREF(event); Py_XDECREF(events);
    return code;
}

#else

static int trace(PyObject *self, PyFrameObject *frame, int what, PyObject *arg) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    int ours = is_ours(code);
    Py_DECREF(code);
    if (!ours) return 0;
    if (what == PyTrace_CALL) return PyObject_SetAttrString((PyObject *)frame, "f_trace_opcodes", Py_True);
    if (what != PyTrace_OPCODE || ++bytecodes != wanted) return 0;
    PyEval_SetTrace(NULL, NULL);
    return interrupt();
}

static int watch(int is_on) {
    PyEval_SetTrace(is_on ? trace : NULL, is_on ? Py_None : NULL);
    return 0;
}

#endif

static PyObject *start(PyObject *self, PyObject *args) {
    if (!PyArg_ParseTuple(args, "slOO", &folder, &wanted, &function, &error)) return NULL;
    if (error == Py_None) error = NULL;
    bytecodes = 0;
#if PY_VERSION_HEX >= 0x030c0000
    thread = PyThread_get_thread_ident();
#endif
    if (watch(1)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *stop(PyObject *self, PyObject *args) {
    if (watch(0)) return NULL;
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
    """Run it in a thread of its own: an error at the very end of an `except` clause stays the one that is handled.

    Nothing is collected meanwhile: an error in a finalizer, or in a callback of the collector as hypothesis has one, is
    lost whoever records.
    """
    with without_collection(), ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
