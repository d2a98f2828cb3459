/* The hot ways of `rltrace/record/repeated.py`: what runs at both ends of a span that a step has hundreds of.

   A hook of Python touches some hundred lines of memory, none of which is in the processor's caches when a program has
   worked in between. This does the same with a tenth of them, and writes the same bytes. Whatever is not hot is left to
   the function of Python that each object is made with. */

#include "records.h"

static PyObject *live_name;

/* Forget an error of ours: all that can raise here is in C, and no error from outside. */
static int refused(void) {
    PyErr_Clear();
    return 0;
}

/* Call something in C that cannot fail. */
static void call(PyObject *function) {
    PyObject *result = PyObject_CallNoArgs(function);
    if (result == NULL) PyErr_Clear();
    Py_XDECREF(result);
}

/* Write a time as msgpack does; every clock shows more than 32 bits four seconds after its start. */
static char *put_time(char *at, int64_t time_ns) {
    *at++ = (char)0xcf;
    for (int shift = 56; shift >= 0; shift -= 8) *at++ = (char)((uint64_t)time_ns >> shift);
    return at;
}

#define TIMES_BYTES 18

/* Append a record to the thread's segment: what precedes the times, both times, and what follows them. Returns whether
   that was done; where it was not, nothing is written. */
static int append(PyObject *head, int64_t start_ns, PyObject *tail) {
    Py_ssize_t head_bytes = PyBytes_Size(head), tail_bytes = PyBytes_Size(tail);
    Py_ssize_t many = head_bytes + TIMES_BYTES + tail_bytes;
    PyObject *task;
    const char *first = PyBytes_AsString(head);
    char *at;
    if (start_ns <= UINT32_MAX || !is_whole() || !find_task(&task) || task != NULL) return 0;
    if ((at = room_for(many)) == NULL) return 0;
    memcpy(at + 1, first + 1, (size_t)head_bytes - 1);
    at = put_time(put_time(at + head_bytes, start_ns), now_ns());
    memcpy(at, PyBytes_AsString(tail), (size_t)tail_bytes);
    publish(*first, many);
    return 1;
}

/* ---- calls of a module ---- */

typedef struct {
    PyObject_HEAD
    PyObject *gate, *kind, *slow; /* which hook this is; says -1 in a call of the first kind; writes what is not hot */
    int (*kind_in_c)(void); /* says the same, with less on the way; NULL if there is no such function */
    PyObject *head, *first, *second, *count; /* NULL until the span is known */
    PyObject *starts_ns; /* a list, of the calls that are under way; 0 for one without a span */
} Calls;

static PyObject *calls_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *gate, *kind, *slow, *starts_ns;
    unsigned long long address;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Calls *self;
    if (keywords != NULL && PyDict_Size(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Calls takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OO!OKO", &gate, &PyList_Type, &starts_ns, &kind, &address, &slow)) return NULL;
    self = (Calls *)allocate(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(gate), Py_INCREF(kind), Py_INCREF(slow), Py_INCREF(starts_ns);
    self->gate = gate, self->kind = kind, self->slow = slow, self->starts_ns = starts_ns;
    self->kind_in_c = (int (*)(void))(uintptr_t)address;
    return (PyObject *)self;
}

static int is_live(Calls *self) {
    PyObject *live = PyObject_GetAttr(self->gate, live_name);
    int is = live == NULL ? -1 : PyObject_IsTrue(live);
    Py_XDECREF(live);
    return is < 0 ? refused() : is;
}

/* Return when the call that ends here has begun, and forget it. */
static int64_t taken_start(Calls *self) {
    Py_ssize_t many = PyList_Size(self->starts_ns);
    int64_t start_ns = many > 0 ? PyLong_AsLongLong(PyList_GetItem(self->starts_ns, many - 1)) : 0;
    if (many > 0) PyList_SetSlice(self->starts_ns, many - 1, many, NULL);
    if (PyErr_Occurred()) PyErr_Clear();
    return start_ns;
}

/* What follows the times in the span's record; NULL if nobody says of which kind the call is. */
static PyObject *tail_of(Calls *self) {
    PyObject *said;
    long kind;
    if (self->kind_in_c != NULL) return self->kind_in_c() == -1 ? self->first : self->second;
    said = PyObject_CallNoArgs(self->kind);
    kind = said == NULL ? -2 : PyLong_AsLong(said);
    Py_XDECREF(said);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return NULL;
    }
    return kind == -1 ? self->first : self->second;
}

static PyObject *calls_after(Calls *self, PyObject *nothing) {
    int64_t start_ns = taken_start(self);
    PyObject *tail;
    (void)nothing;
    if (!start_ns || !is_live(self)) Py_RETURN_NONE;
    if (self->head != NULL && (tail = tail_of(self)) != NULL && append(self->head, start_ns, tail)) {
        call(self->count);
        Py_RETURN_NONE;
    }
    {
        PyObject *time = PyLong_FromLongLong(start_ns), *result;
        if (time == NULL) return NULL;
        result = PyObject_CallFunctionObjArgs(self->slow, time, NULL);
        Py_DECREF(time);
        return result;
    }
}

/* From here on the record is known: what precedes the times, what follows them in a call of the first kind and of the
   second, and what counts the calls. */
static PyObject *calls_know(Calls *self, PyObject *args) {
    PyObject *head, *first, *second, *count;
    if (!PyArg_ParseTuple(args, "O!O!O!O", &PyBytes_Type, &head, &PyBytes_Type, &first, &PyBytes_Type, &second, &count))
        return NULL;
    if (self->head == NULL) {
        Py_INCREF(head), Py_INCREF(first), Py_INCREF(second), Py_INCREF(count);
        self->first = first, self->second = second, self->count = count, self->head = head;
    }
    Py_RETURN_NONE;
}

static int calls_traverse(Calls *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->gate);
    Py_VISIT(self->kind);
    Py_VISIT(self->slow);
    Py_VISIT(self->count);
    return 0;
}

static int calls_clear(Calls *self) {
    (void)self; /* the function of Python that this has is a part of each cycle, and is cleared */
    return 0;
}

static void calls_dealloc(Calls *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->gate), Py_XDECREF(self->kind), Py_XDECREF(self->slow), Py_XDECREF(self->starts_ns);
    Py_XDECREF(self->head), Py_XDECREF(self->first), Py_XDECREF(self->second), Py_XDECREF(self->count);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef calls_methods[] = {
    {"after", (PyCFunction)calls_after, METH_NOARGS, "End a call, and write its span."},
    {"know", (PyCFunction)calls_know, METH_VARARGS, "Learn what each span says."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_new, calls_new},           {Py_tp_methods, calls_methods}, {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear},       {Py_tp_dealloc, calls_dealloc}, {0, NULL},
};

static PyType_Spec calls_spec = {
    "rltrace.record.native.records.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, calls_slots,
};

/* ---- what one hook begins, and another ends ---- */

typedef struct {
    PyObject_HEAD
    PyObject *said, *head, *tail;
    int64_t parts, left, start_ns;
} Stretch;

static PyObject *stretch_type;

static PyObject *stretch_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *said, *around, *head, *tail;
    long long parts;
    Stretch *self = NULL;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "OL", &said, &parts)) return NULL;
    around = PyObject_CallMethod(said, "around_times", NULL);
    if (around == NULL) return NULL;
    if (PyArg_ParseTuple(around, "SS", &head, &tail)) self = (Stretch *)allocate(type, 0);
    if (self != NULL) {
        Py_INCREF(said), Py_INCREF(head), Py_INCREF(tail);
        self->said = said, self->head = head, self->tail = tail, self->parts = parts;
    }
    Py_DECREF(around);
    return (PyObject *)self;
}

static void stretch_dealloc(Stretch *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    Py_XDECREF(self->said), Py_XDECREF(self->head), Py_XDECREF(self->tail);
    release(self);
    Py_DECREF(type);
}

static PyMemberDef stretch_members[] = {
    {"said", T_OBJECT_EX, offsetof(Stretch, said), READONLY, "What its span says."},
    {"head", T_OBJECT_EX, offsetof(Stretch, head), READONLY, "What precedes the times in its record."},
    {"tail", T_OBJECT_EX, offsetof(Stretch, tail), READONLY, "What follows them."},
    {"parts", T_LONGLONG, offsetof(Stretch, parts), READONLY, "How many parts end before it does."},
    {"left", T_LONGLONG, offsetof(Stretch, left), 0, "How many of them have not ended; 0 if it is over."},
    {"start_ns", T_LONGLONG, offsetof(Stretch, start_ns), 0, "When it began."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot stretch_slots[] = {
    {Py_tp_new, stretch_new}, {Py_tp_dealloc, stretch_dealloc}, {Py_tp_members, stretch_members}, {0, NULL},
};

static PyType_Spec stretch_spec = {
    "rltrace.record.native.records.Stretch", sizeof(Stretch), 0, Py_TPFLAGS_DEFAULT, stretch_slots,
};

typedef struct {
    PyObject_HEAD
    PyObject *known, *slow, *count; /* stretches by the ids of their objects; `count` is NULL until the first one */
} End;

static PyObject *end_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *known, *slow;
    End *self;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "O!O", &PyDict_Type, &known, &slow)) return NULL;
    self = (End *)allocate(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(known), Py_INCREF(slow);
    self->known = known, self->slow = slow;
    return (PyObject *)self;
}

/* Return the stretch of an object, with a reference; NULL without one. */
static Stretch *stretch_of(End *self, PyObject *of) {
    PyObject *id = PyLong_FromVoidPtr(of), *found;
    if (id == NULL) {
        PyErr_Clear();
        return NULL;
    }
    found = PyDict_GetItemWithError(self->known, id);
    Py_DECREF(id);
    if (found == NULL || Py_TYPE(found) != (PyTypeObject *)stretch_type) {
        PyErr_Clear();
        return NULL;
    }
    Py_INCREF(found);
    return (Stretch *)found;
}

static PyObject *end_begin(End *self, PyObject *of) {
    Stretch *stretch = stretch_of(self, of);
    if (stretch == NULL || stretch->left || self->count == NULL) {
        Py_XDECREF((PyObject *)stretch);
        return PyObject_CallFunctionObjArgs(self->slow, of, NULL);
    }
    stretch->start_ns = now_ns();
    stretch->left = stretch->parts;
    Py_DECREF((PyObject *)stretch);
    call(self->count);
    Py_RETURN_NONE;
}

static PyObject *end_end(End *self, PyObject *of) {
    Stretch *stretch = stretch_of(self, of);
    PyObject *result = NULL;
    if (stretch == NULL) Py_RETURN_NONE;
    if (stretch->left > 1) stretch->left--;
    else if (stretch->left) {
        int64_t start_ns = stretch->start_ns;
        stretch->left = 0;
        if (self->count != NULL && append(stretch->head, start_ns, stretch->tail)) call(self->count);
        else {
            PyObject *time = PyLong_FromLongLong(start_ns);
            if (time != NULL) result = PyObject_CallFunctionObjArgs(self->slow, (PyObject *)stretch, time, NULL);
            Py_XDECREF(time);
            Py_DECREF((PyObject *)stretch);
            return result;
        }
    }
    Py_DECREF((PyObject *)stretch);
    Py_RETURN_NONE;
}

static PyObject *end_know(End *self, PyObject *count) {
    PyObject *before = self->count;
    Py_INCREF(count);
    self->count = count;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static int end_traverse(End *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->known);
    Py_VISIT(self->slow);
    Py_VISIT(self->count);
    return 0;
}

static int end_clear(End *self) {
    (void)self; /* as `calls_clear` */
    return 0;
}

static void end_dealloc(End *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->known), Py_XDECREF(self->slow), Py_XDECREF(self->count);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef end_methods[] = {
    {"begin", (PyCFunction)end_begin, METH_O, "Begin the stretch of an object."},
    {"end", (PyCFunction)end_end, METH_O, "End a part of it; with its last part, write its span."},
    {"know", (PyCFunction)end_know, METH_O, "Learn what counts the calls."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot end_slots[] = {
    {Py_tp_new, end_new},         {Py_tp_methods, end_methods}, {Py_tp_traverse, end_traverse},
    {Py_tp_clear, end_clear},     {Py_tp_dealloc, end_dealloc}, {0, NULL},
};

static PyType_Spec end_spec = {
    "rltrace.record.native.records.StretchEnd", sizeof(End), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, end_slots,
};

int add_repeated(PyObject *module) {
    PyObject *calls_type = PyType_FromSpec(&calls_spec), *end_type = PyType_FromSpec(&end_spec);
    live_name = PyUnicode_InternFromString("live"), stretch_type = PyType_FromSpec(&stretch_spec);
    if (!live_name || !stretch_type || !calls_type || !end_type) return -1;
    if (PyModule_AddObjectRef(module, "Stretch", stretch_type) < 0) return -1;
    if (PyModule_AddObjectRef(module, "Calls", calls_type) < 0) return -1;
    return PyModule_AddObjectRef(module, "StretchEnd", end_type);
}
