/* The module: the hot ways of `rltrace/record`, which write what its functions of Python write. */

#include "records.h"

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "records", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_records(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (add_segments(module) < 0 || add_spans(module) < 0 || add_repeated(module) < 0 ||
        PyModule_AddIntConstant(module, "SOURCE", SOURCE) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
