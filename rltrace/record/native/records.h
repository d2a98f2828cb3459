/* What the hot ways of records share: the thread's segment, the clock, and what `rltrace/record/spans.py` knows.

   It uses the stable interface of Python, so that one library serves every CPython from 3.10 on. Nothing here runs
   Python's code but the functions of Python that do what is not hot, so a signal handler cannot come in between; the
   interpreter's lock is held. */

#ifndef RLTRACE_RECORDS_H
#define RLTRACE_RECORDS_H

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

extern PyObject *spans_names; /* what is in `rltrace.record.spans` */

/* Return a value of that module; NULL, without an error, if there is none. */
PyObject *of_spans(PyObject *name);

int64_t now_ns(void);

/* Return whether everything is recorded. */
int is_whole(void);

/* Find the asyncio task that runs in this thread; NULL if none does. Returns whether that could be told. */
int find_task(PyObject **task);

/* Return where `many` bytes can be written in the thread's segment, NULL if there is no room. All but the first are
   written there, then `publish` writes the first. */
char *room_for(Py_ssize_t many);

/* Make the bytes that were written a record of the segment. Who reads it meanwhile takes a record whose first byte is
   there for whole. */
void publish(char first, Py_ssize_t many);

int add_segments(PyObject *module);
int add_spans(PyObject *module);
int add_repeated(PyObject *module);

#endif
