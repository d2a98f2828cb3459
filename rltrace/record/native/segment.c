/* A segment: memory that records are appended to, and which one is the thread's. */

#include "records.h"

#include <time.h>

PyObject *spans_names;
static PyObject *spans, *running_loop, *task_of; /* the module, `asyncio._get_running_loop`, and what has a loop's task */
static PyObject *tasks; /* the tasks that run, if Python keeps them in a dictionary */
static PyObject *always_name, *local_name, *write_name;

PyObject *of_spans(PyObject *name) {
    PyObject *found = PyDict_GetItemWithError(spans_names, name);
    if (found == NULL) PyErr_Clear();
    return found;
}

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int is_whole(void) {
    return of_spans(always_name) == Py_None;
}

int find_task(PyObject **task) {
    PyObject *loop, *found = NULL;
    *task = NULL;
    if (tasks != NULL && !PyDict_Size(tasks)) return 1;
    loop = PyObject_CallNoArgs(running_loop);
    if (loop != NULL && loop != Py_None) {
        found = PyObject_CallFunctionObjArgs(task_of, loop, NULL);
        if (found != NULL && found != Py_None) *task = found; /* the loop keeps it while it runs */
        Py_XDECREF(found);
    }
    if (loop == NULL || (loop != Py_None && found == NULL)) {
        Py_XDECREF(loop);
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(loop);
    return 1;
}

typedef struct {
    PyObject_HEAD
    PyObject *owner; /* keeps the memory mapped; NULL once it is closed */
    char *memory;
    Py_ssize_t room_bytes, used_bytes;
} Writer;

static PyObject *writer_type;
static __thread Writer *own; /* of the thread's segment, with a reference, once it has written here */

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *owner;
    unsigned long long address;
    Py_ssize_t room_bytes;
    Writer *self;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "OKn", &owner, &address, &room_bytes)) return NULL;
    self = (Writer *)allocate(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(owner);
    self->owner = owner, self->memory = (char *)(uintptr_t)address, self->room_bytes = room_bytes;
    return (PyObject *)self;
}

/* Write the first byte behind all others, also for who reads the file from another processor. */
static void append(Writer *self, char first, Py_ssize_t many) {
    __atomic_store_n(self->memory + self->used_bytes, first, __ATOMIC_RELEASE);
    self->used_bytes += many;
}

static PyObject *writer_write(Writer *self, PyObject *data) {
    char *bytes;
    Py_ssize_t many;
    if (PyBytes_AsStringAndSize(data, &bytes, &many) < 0) return NULL;
    if (many > self->room_bytes - self->used_bytes) {
        PyErr_SetString(PyExc_ValueError, self->owner == NULL ? "the segment is closed" : "the segment is full");
        return NULL;
    }
    if (many) {
        memcpy(self->memory + self->used_bytes + 1, bytes + 1, (size_t)many - 1);
        append(self, bytes[0], many);
    }
    Py_RETURN_NONE;
}

static PyObject *writer_close(Writer *self, PyObject *nothing) {
    PyObject *owner = self->owner;
    (void)nothing;
    self->owner = NULL, self->memory = NULL, self->room_bytes = self->used_bytes;
    Py_XDECREF(owner);
    Py_RETURN_NONE;
}

static void writer_dealloc(Writer *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    Py_XDECREF(self->owner);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef writer_methods[] = {
    {"write", (PyCFunction)writer_write, METH_O, "Append bytes; raises ValueError if there is no room for them."},
    {"close", (PyCFunction)writer_close, METH_NOARGS, "Write nothing any more, and let go of the memory."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef writer_members[] = {
    {"used_bytes", T_PYSSIZET, offsetof(Writer, used_bytes), READONLY, "How much is written."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_new, writer_new},         {Py_tp_methods, writer_methods}, {Py_tp_members, writer_members},
    {Py_tp_dealloc, writer_dealloc}, {0, NULL},
};

static PyType_Spec writer_spec = {
    "rltrace.record.native.records.Writer", sizeof(Writer), 0, Py_TPFLAGS_DEFAULT, writer_slots,
};

/* Forget which segment this thread writes to. */
static void let_go(void) {
    Writer *before = own;
    own = NULL;
    Py_XDECREF((PyObject *)before);
}

/* Find this thread's segment; it has none before its first record, nor on a full disk. */
static Writer *found_own(void) {
    PyObject *local = PyObject_GetAttr(spans, local_name), *write = NULL, *self = NULL;
    if (local != NULL) write = PyObject_GetAttr(local, write_name);
    Py_XDECREF(local);
    if (write != NULL && PyCFunction_Check(write)) self = PyCFunction_GetSelf(write);
    if (self != NULL && Py_TYPE(self) == (PyTypeObject *)writer_type) {
        Py_INCREF(self);
        own = (Writer *)self;
    }
    Py_XDECREF(write);
    PyErr_Clear();
    return own;
}

char *room_for(Py_ssize_t many) {
    Writer *writer = own;
    if (writer == NULL && (writer = found_own()) == NULL) return NULL;
    if (many <= writer->room_bytes - writer->used_bytes) return writer->memory + writer->used_bytes;
    let_go(); /* it is full, or closed */
    return NULL;
}

void publish(char first, Py_ssize_t many) {
    append(own, first, many);
}

static PyObject *use(PyObject *module, PyObject *args) {
    PyObject *of_spans, *loop, *of_loop, *of_loops;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO", &of_spans, &loop, &of_loop)) return NULL;
    of_loops = PyObject_GetAttrString(of_spans, "_current_tasks");
    if (of_loops == NULL) return NULL;
    /* Those that were used before are kept: another thread may be asking them. */
    Py_INCREF(of_spans), Py_INCREF(loop), Py_INCREF(of_loop);
    spans = of_spans, running_loop = loop, task_of = of_loop;
    spans_names = PyModule_GetDict(of_spans);
    tasks = PyDict_Check(of_loops) ? of_loops : NULL;
    Py_RETURN_NONE;
}

static PyObject *forget(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    let_go();
    Py_RETURN_NONE;
}

static PyObject *remember(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    let_go();
    found_own();
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"use", use, METH_VARARGS, "Set where records go, and what returns the event loop of this thread, and its task."},
    {"forget", forget, METH_NOARGS, "Forget which segment this thread writes to."},
    {"remember", remember, METH_NOARGS, "Remember which segment this thread writes to, beyond its call of Python."},
    {NULL, NULL, 0, NULL},
};

int add_segments(PyObject *module) {
    always_name = PyUnicode_InternFromString("_always"), local_name = PyUnicode_InternFromString("_local");
    write_name = PyUnicode_InternFromString("write"), writer_type = PyType_FromSpec(&writer_spec);
    if (!always_name || !local_name || !write_name || !writer_type) return -1;
    return PyModule_AddObjectRef(module, "Writer", writer_type) < 0 ? -1 : PyModule_AddFunctions(module, functions);
}
