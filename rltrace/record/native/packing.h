/* Packs what a record is made of, as msgspec's encoder does, into a few hundred bytes. Whatever is longer, or is of
   another type than these, is refused. */

#ifndef RLTRACE_PACKING_H
#define RLTRACE_PACKING_H

#include "records.h"

#define MOST_PACKED_BYTES 512

typedef struct {
    char bytes[MOST_PACKED_BYTES];
    Py_ssize_t many;
    int is_refused;
} Packed;

static void pack_bytes(Packed *packed, const char *bytes, Py_ssize_t many) {
    if (packed->is_refused || many > MOST_PACKED_BYTES - packed->many) {
        packed->is_refused = 1;
        return;
    }
    memcpy(packed->bytes + packed->many, bytes, (size_t)many);
    packed->many += many;
}

/* A byte that says what follows, and a number of so many bytes, the highest first. */
static void pack_number(Packed *packed, int kind, uint64_t number, int number_bytes) {
    char bytes[9];
    bytes[0] = (char)kind;
    for (int at = 0; at < number_bytes; at++) bytes[1 + at] = (char)(number >> 8 * (number_bytes - 1 - at));
    pack_bytes(packed, bytes, 1 + number_bytes);
}

static void pack_natural(Packed *packed, uint64_t number) {
    if (number < 128) pack_number(packed, (int)number, 0, 0);
    else if (number <= UINT8_MAX) pack_number(packed, 0xcc, number, 1);
    else if (number <= UINT16_MAX) pack_number(packed, 0xcd, number, 2);
    else if (number <= UINT32_MAX) pack_number(packed, 0xce, number, 4);
    else pack_number(packed, 0xcf, number, 8);
}

static void pack_integer(Packed *packed, int64_t number) {
    if (number >= 0) pack_natural(packed, (uint64_t)number);
    else if (number >= -32) pack_number(packed, (int)(number & 0xff), 0, 0);
    else if (number >= INT8_MIN) pack_number(packed, 0xd0, (uint64_t)number, 1);
    else if (number >= INT16_MIN) pack_number(packed, 0xd1, (uint64_t)number, 2);
    else if (number >= INT32_MIN) pack_number(packed, 0xd2, (uint64_t)number, 4);
    else pack_number(packed, 0xd3, (uint64_t)number, 8);
}

static void pack_bool(Packed *packed, int is_true) {
    pack_number(packed, is_true ? 0xc3 : 0xc2, 0, 0);
}

static void pack_int(Packed *packed, PyObject *number) {
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow) packed->is_refused = 1;
    else pack_integer(packed, value);
}

static void pack_float(Packed *packed, PyObject *number) {
    double value = PyFloat_AsDouble(number);
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    pack_number(packed, 0xcb, bits, 8);
}

static void pack_text(Packed *packed, PyObject *text) {
    Py_ssize_t many;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &many);
    if (bytes == NULL) { /* half a surrogate pair */
        PyErr_Clear();
        packed->is_refused = 1;
        return;
    }
    if (many < 32) pack_number(packed, 0xa0 | (int)many, 0, 0);
    else if (many <= UINT8_MAX) pack_number(packed, 0xd9, (uint64_t)many, 1);
    else pack_number(packed, 0xda, (uint64_t)many, 2);
    pack_bytes(packed, bytes, many);
}

static void pack_value(Packed *packed, PyObject *value) {
    if (PyUnicode_CheckExact(value)) pack_text(packed, value);
    else if (PyLong_CheckExact(value)) pack_int(packed, value);
    else if (PyFloat_CheckExact(value)) pack_float(packed, value);
    else if (value == Py_True || value == Py_False) pack_bool(packed, value == Py_True);
    else if (value == Py_None) pack_number(packed, 0xc0, 0, 0);
    else packed->is_refused = 1;
}

/* Pack arguments without one of them, which need not be there; None stands for none. */
static void pack_args(Packed *packed, PyObject *args, PyObject *without) {
    PyObject *key, *value;
    Py_ssize_t at = 0, many;
    if (args == Py_None) {
        pack_value(packed, args);
        return;
    }
    if (!PyDict_CheckExact(args)) {
        packed->is_refused = 1;
        return;
    }
    many = PyDict_Size(args) - (without != NULL && PyDict_GetItemWithError(args, without) != NULL);
    if (many < 16) pack_number(packed, 0x80 | (int)many, 0, 0);
    else pack_number(packed, 0xde, (uint64_t)many, 2);
    while (!packed->is_refused && PyDict_Next(args, &at, &key, &value)) {
        if (!PyUnicode_CheckExact(key)) packed->is_refused = 1;
        else if (without == NULL || PyUnicode_Compare(key, without) != 0) {
            pack_text(packed, key);
            pack_value(packed, value);
        }
    }
}

/* Write what is packed into the thread's segment; return whether that was done. */
static int write_packed(const Packed *packed) {
    char *at = packed->is_refused ? NULL : room_for(packed->many);
    if (at == NULL) return 0;
    memcpy(at + 1, packed->bytes + 1, (size_t)packed->many - 1);
    publish(packed->bytes[0], packed->many);
    return 1;
}

#endif
