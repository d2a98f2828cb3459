/* The hot ways of `rltrace/record/spans.py`: a span's beginning and end, a span that is over, and a sample.

   Each writes what the function of Python does that it stands for, and leaves to that function whatever is not hot:
   the first record of a thread, a full segment, an argument that is neither text nor number, an error. */

#include "packing.h"

static PyObject *recorder_name, *newest_name, *task_name, *start_name, *args_name, *lane_name, *maker_name, *encoder_name;
static PyObject *kinds; /* of spans: the type to what precedes a record's fields, and the names of these */
static PyObject *no_span, *encode, *zero;
static PyObject *enter_slowly, *leave_slowly, *finish_slowly, *count_slowly; /* of a tuple that is never let go of */

/* Return whether this process records now. */
static int is_recording(void) {
    PyObject *recorder = of_spans(recorder_name);
    return recorder != NULL && recorder != Py_None;
}

/* Pack an attribute of a span. */
static void pack_field(Packed *packed, PyObject *span, PyObject *name) {
    PyObject *value = PyObject_GetAttr(span, name);
    if (value == NULL) {
        PyErr_Clear();
        packed->is_refused = 1;
        return;
    }
    if (name == args_name) pack_args(packed, value, NULL);
    else pack_value(packed, value);
    Py_DECREF(value);
}

/* Set a field of a span to a number; return whether that was done. */
static int set_number(PyObject *span, PyObject *name, PyObject *number) {
    int is_set = number != NULL && PyObject_SetAttr(span, name, number) == 0;
    Py_XDECREF(number);
    if (!is_set) PyErr_Clear();
    return is_set;
}

/* Write a span's beginning; return whether that was done. */
static int begin(PyObject *span) {
    PyObject *kind = PyDict_GetItemWithError(kinds, (PyObject *)Py_TYPE(span)), *fields, *task;
    Packed packed = {.many = 0, .is_refused = 0};
    int64_t start_ns;
    if (kind == NULL || !find_task(&task)) {
        PyErr_Clear();
        return 0;
    }
    if (task != NULL && !set_number(span, task_name, PyLong_FromVoidPtr(task))) return 0;
    start_ns = now_ns();
    if (!set_number(span, start_name, PyLong_FromLongLong(start_ns))) return 0;
    if (PyDict_SetItem(spans_names, newest_name, span) < 0) {
        PyErr_Clear();
        return 0;
    }
    pack_bytes(&packed, PyBytes_AsString(PyTuple_GetItem(kind, 0)), PyBytes_Size(PyTuple_GetItem(kind, 0)));
    fields = PyTuple_GetItem(kind, 1);
    for (Py_ssize_t at = 0; at < PyTuple_Size(fields); at++) pack_field(&packed, span, PyTuple_GetItem(fields, at));
    if (task != NULL) pack_natural(&packed, (uint64_t)(uintptr_t)task);
    else pack_field(&packed, span, task_name);
    pack_integer(&packed, start_ns);
    pack_field(&packed, span, args_name);
    pack_bool(&packed, 1);
    if (!write_packed(&packed)) return 0;
    if (PyObject_SetAttr(span, args_name, Py_None) < 0) PyErr_Clear();
    return 1;
}

static PyObject *enter(PyObject *span, PyObject *nothing) {
    (void)nothing;
    if (is_recording() && !begin(span)) return PyObject_CallFunctionObjArgs(enter_slowly, span, NULL);
    Py_INCREF(span);
    return span;
}

/* Write a span's end; return whether that was done. */
static int end(PyObject *span) {
    Packed packed = {.many = 0, .is_refused = 0};
    pack_number(&packed, 0x94, 0, 0);
    pack_field(&packed, span, start_name);
    pack_integer(&packed, now_ns());
    pack_field(&packed, span, args_name);
    pack_bool(&packed, 1);
    return write_packed(&packed);
}

static PyObject *leave(PyObject *span, PyObject *const *error, Py_ssize_t many) {
    if (many < 1 || many > 3) {
        PyErr_Format(PyExc_TypeError, "__exit__ takes 1 to 3 arguments, not %zd", many);
        return NULL;
    }
    if (!is_recording()) Py_RETURN_NONE;
    if ((error[0] == Py_None || error[0] == PyExc_GeneratorExit) && end(span)) Py_RETURN_NONE;
    return PyObject_CallFunctionObjArgs(
        leave_slowly, span, error[0], many > 1 ? error[1] : Py_None, many > 2 ? error[2] : Py_None, NULL
    );
}

/* Return whether a number is one of 63 bits or less, and set it. */
static int is_whole_number(PyObject *number, int64_t *value) {
    int overflow;
    if (!PyLong_CheckExact(number)) return 0;
    *value = PyLong_AsLongLongAndOverflow(number, &overflow);
    return !overflow;
}

/* Write an automatic span that is over; return whether that was done. */
static int finish(PyObject *name, PyObject *start, PyObject *end, PyObject *args) {
    PyObject *lane = args == NULL ? NULL : PyDict_GetItemWithError(args, lane_name);
    int64_t start_ns, end_ns, lane_number = 0;
    Packed packed = {.many = 0, .is_refused = 0};
    if (!is_whole() || !PyUnicode_CheckExact(name)) return 0;
    if (!is_whole_number(start, &start_ns) || !is_whole_number(end, &end_ns) || start_ns < 0 || end_ns < start_ns) return 0;
    if (lane != NULL && (!is_whole_number(lane, &lane_number) || lane_number == INT64_MIN)) return 0;
    pack_bytes(&packed, "\x97\x00", 2);
    pack_text(&packed, name);
    pack_integer(&packed, lane_number);
    pack_integer(&packed, start_ns);
    pack_integer(&packed, end_ns);
    if (args == NULL) pack_number(&packed, 0x80, 0, 0);
    else pack_args(&packed, args, lane_name);
    pack_bool(&packed, 1);
    return write_packed(&packed);
}

static PyObject *automatic_span_at(PyObject *module, PyObject *args, PyObject *keywords) {
    (void)module;
    if (PyTuple_Size(args) == 3) {
        if (!is_recording()) Py_RETURN_NONE;
        if (finish(PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 1), PyTuple_GetItem(args, 2), keywords))
            Py_RETURN_NONE;
    }
    return PyObject_Call(finish_slowly, args, keywords);
}

static PyObject *automatic_span(PyObject *module, PyObject *args, PyObject *keywords) {
    PyObject *name, *maker = of_spans(maker_name), *own, *span;
    (void)module;
    if (!PyArg_ParseTuple(args, "O", &name)) return NULL;
    if (!is_recording()) {
        Py_INCREF(no_span);
        return no_span;
    }
    own = keywords == NULL ? PyDict_New() : PyDict_Copy(keywords);
    span = own == NULL || maker == NULL ? NULL : PyObject_CallFunctionObjArgs(maker, name, zero, zero, own, NULL);
    Py_XDECREF(own);
    return span;
}

/* Write a sample; return whether that was done. */
static int sample(PyObject *name, PyObject *value) {
    Packed packed = {.many = 0, .is_refused = 0};
    if (of_spans(encoder_name) != encode || !PyUnicode_CheckExact(name)) return 0; /* somebody watches, or not all is kept */
    pack_number(&packed, 0x94, 0, 0);
    pack_text(&packed, name);
    pack_integer(&packed, now_ns());
    pack_value(&packed, value);
    pack_bool(&packed, 1);
    return write_packed(&packed);
}

static PyObject *counter(PyObject *module, PyObject *const *args, Py_ssize_t many) {
    (void)module;
    if (many != 2) {
        PyErr_Format(PyExc_TypeError, "counter takes 2 arguments, a name and a value, not %zd", many);
        return NULL;
    }
    if (!is_recording() || sample(args[0], args[1])) Py_RETURN_NONE;
    return PyObject_CallFunctionObjArgs(count_slowly, args[0], args[1], NULL);
}

static PyMethodDef enter_definition = {"__enter__", (PyCFunction)enter, METH_NOARGS, "Begin the span."};
static PyMethodDef leave_definition = {
    "__exit__", (PyCFunction)(void (*)(void))leave, METH_FASTCALL, "End the span.",
};

/* Return what stands for five functions of `rltrace.record.spans`, which are called for what is not hot: a span's
   `__enter__` and `__exit__`, `automatic_span`, `automatic_span_at` and `counter`. */
static PyObject *standing_for(PyObject *module, PyObject *args) {
    PyObject *owner, *plain, *made;
    if (!PyArg_ParseTuple(args, "O!O!OOO!", &PyType_Type, &owner, &PyDict_Type, &kinds, &no_span, &encode, &PyTuple_Type, &plain))
        return NULL;
    if (!PyArg_ParseTuple(plain, "OOOOO", &enter_slowly, &leave_slowly, &made, &finish_slowly, &count_slowly)) return NULL;
    Py_INCREF(kinds), Py_INCREF(no_span), Py_INCREF(encode), Py_INCREF(plain);
    return Py_BuildValue(
        "NNNNN", PyDescr_NewMethod((PyTypeObject *)owner, &enter_definition),
        PyDescr_NewMethod((PyTypeObject *)owner, &leave_definition), PyObject_GetAttrString(module, "automatic_span"),
        PyObject_GetAttrString(module, "automatic_span_at"), PyObject_GetAttrString(module, "counter")
    );
}

static PyMethodDef functions[] = {
    {"standing_for", standing_for, METH_VARARGS, "Return what stands for functions of `rltrace.record.spans`."},
    {"automatic_span", (PyCFunction)(void (*)(void))automatic_span, METH_VARARGS | METH_KEYWORDS,
     "Make a span for a hook."},
    {"automatic_span_at", (PyCFunction)(void (*)(void))automatic_span_at, METH_VARARGS | METH_KEYWORDS,
     "Record, for a hook, a span that is over."},
    {"counter", (PyCFunction)(void (*)(void))counter, METH_FASTCALL,
     "counter(name, value, /)\n--\n\n"
     "Record a sample of a value; its name ends with the unit (`allocated_bytes`)."},
    {NULL, NULL, 0, NULL},
};

int add_spans(PyObject *module) {
    recorder_name = PyUnicode_InternFromString("_recorder"), newest_name = PyUnicode_InternFromString("newest");
    task_name = PyUnicode_InternFromString("task"), start_name = PyUnicode_InternFromString("start_ns");
    args_name = PyUnicode_InternFromString("args"), lane_name = PyUnicode_InternFromString("lane");
    maker_name = PyUnicode_InternFromString("_make_automatic_span");
    encoder_name = PyUnicode_InternFromString("_encode_sample"), zero = PyLong_FromLong(0);
    if (!recorder_name || !newest_name || !task_name || !start_name || !args_name || !lane_name || !maker_name ||
        !encoder_name || !zero)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
