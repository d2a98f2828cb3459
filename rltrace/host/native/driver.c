/* Asks NVIDIA's management library how a GPU's memory is divided, for `rltrace/host/nvml.py`.

   A traced process asks within its steps, where nothing of ctypes is in the processor's caches: this takes a third less
   than the same call through ctypes. It links to no library of NVIDIA's: Python, which has loaded it, says where the
   function is. It uses the stable interface of Python, so that one library serves every CPython from 3.10 on. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* nvmlMemory_v2_t of nvml.h */
typedef struct {
    unsigned int version;
    unsigned long long total_bytes, reserved_bytes, free_bytes, used_bytes;
} Memory;

#define VERSION_2 (sizeof(Memory) | 2u << 24)

typedef int (*GetMemoryInfo)(void *device, Memory *memory);

static PyObject *memory_of(PyObject *module, PyObject *const *args, Py_ssize_t many) {
    Memory memory = {VERSION_2, 0, 0, 0, 0};
    GetMemoryInfo ask;
    void *device;
    int state;
    (void)module;
    if (many != 2) {
        PyErr_SetString(PyExc_TypeError, "memory_of takes the addresses of a function and of a device");
        return NULL;
    }
    ask = (GetMemoryInfo)(uintptr_t)PyLong_AsVoidPtr(args[0]);
    device = PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS /* the driver may be locked */
    state = ask(device, &memory);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(iKKK)", state, memory.used_bytes, memory.reserved_bytes, memory.free_bytes);
}

static PyMethodDef functions[] = {
    {"memory_of", (PyCFunction)(void (*)(void))memory_of, METH_FASTCALL,
     "Call nvmlDeviceGetMemoryInfo_v2; return its state, and the bytes that are used, reserved and free."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "driver", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_driver(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "SOURCE", SOURCE) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
