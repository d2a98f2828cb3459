/* Reads msgpack: every read is checked against the end of the buffer, every size against what is left. */

#ifndef MSGPACK_H
#define MSGPACK_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST_DEPTH 64

typedef enum { INTEGER, BIG, TEXT, NIL, TRUTH, NUMBER, MAP, OTHER } Kind;

typedef struct {
    Kind kind;
    int64_t integer; /* a truth is 0 or 1 */
    double number;
    const uint8_t *text; /* the letters of a text */
    uint32_t length;
    int is_empty;         /* of what is neither number nor text */
    const uint8_t *begin; /* of the encoded value */
} Value;

static inline uint64_t big_endian(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int n = 0; n < bytes; n++) value = value << 8 | at[n];
    return value;
}

static inline uint64_t big_endian_8(const uint8_t *at) {
    return (uint64_t)at[0] << 56 | (uint64_t)at[1] << 48 | (uint64_t)at[2] << 40 | (uint64_t)at[3] << 32 |
           (uint64_t)at[4] << 24 | (uint64_t)at[5] << 16 | (uint64_t)at[6] << 8 | (uint64_t)at[7];
}

static const uint8_t *read_other(const uint8_t *at, const uint8_t *end, Value *value, int depth);

/* Read one value; NULL if it is not whole, or of a kind that only the Python reader knows. What nearly all values are
   is read here, without a call. */
static inline const uint8_t *read_value(const uint8_t *at, const uint8_t *end, Value *value, int depth) {
    if (at >= end) return NULL;
    uint8_t code = *at;
    size_t left = (size_t)(end - at) - 1;
    value->begin = at;
    if (code == 0xcf && left >= 8) { /* a time */
        uint64_t whole = big_endian_8(at + 1);
        if (whole <= INT64_MAX) {
            value->kind = INTEGER;
            value->integer = (int64_t)whole;
            return at + 9;
        }
    } else if (code < 0x80) {
        value->kind = INTEGER;
        value->integer = code;
        return at + 1;
    } else if ((code & 0xe0) == 0xa0 && left >= (size_t)(code & 31)) {
        value->kind = TEXT;
        value->text = at + 1;
        value->length = code & 31;
        return at + 1 + (code & 31);
    } else if (code == 0xd9 && left >= 1 && left - 1 >= at[1]) {
        value->kind = TEXT;
        value->text = at + 2;
        value->length = at[1];
        return at + 2 + at[1];
    } else if (code == 0xc3) {
        value->kind = TRUTH;
        value->integer = 1;
        return at + 1;
    } else if (code == 0xc0) {
        value->kind = NIL;
        return at + 1;
    }
    return read_other(at, end, value, depth);
}

static const uint8_t *read_text(const uint8_t *at, const uint8_t *end, Value *value, uint64_t length) {
    if ((uint64_t)(end - at) < length) return NULL;
    value->kind = TEXT;
    value->text = at;
    value->length = (uint32_t)length;
    return at + length;
}

static const uint8_t *read_many(const uint8_t *at, const uint8_t *end, Value *value, uint64_t many, int is_map, int depth) {
    Value inner;
    if (depth >= MOST_DEPTH || many > (uint64_t)(end - at)) return NULL;
    value->kind = is_map ? MAP : OTHER;
    value->is_empty = many == 0;
    for (uint64_t n = 0; n < many; n++) {
        if (is_map) {
            if (!(at = read_value(at, end, &inner, depth + 1)) || inner.kind != TEXT) return NULL;
        }
        if (!(at = read_value(at, end, &inner, depth + 1))) return NULL;
    }
    return at;
}

/* Read one value of any kind. */
static const uint8_t *read_other(const uint8_t *at, const uint8_t *end, Value *value, int depth) {
    if (at >= end) return NULL;
    uint8_t code = *at;
    value->begin = at++;
    size_t left = (size_t)(end - at);
    if (code < 0x80 || code >= 0xe0) {
        value->kind = INTEGER;
        value->integer = (int8_t)code;
        return at;
    }
    if (code < 0x90) return read_many(at, end, value, code & 15, 1, depth);
    if (code < 0xa0) return read_many(at, end, value, code & 15, 0, depth);
    if (code < 0xc0) return read_text(at, end, value, code & 31);
    switch (code) {
    case 0xc0:
        value->kind = NIL;
        return at;
    case 0xc2:
    case 0xc3:
        value->kind = TRUTH;
        value->integer = code & 1;
        return at;
    case 0xc4:
    case 0xc5:
    case 0xc6: { /* bytes */
        int of_size = 1 << (code - 0xc4);
        if (left < (size_t)of_size) return NULL;
        uint64_t length = big_endian(at, of_size);
        if (left - (size_t)of_size < length) return NULL;
        value->kind = OTHER;
        value->is_empty = length == 0;
        return at + of_size + length;
    }
    case 0xca: {
        if (left < 4) return NULL;
        uint32_t bits = (uint32_t)big_endian(at, 4);
        float number;
        memcpy(&number, &bits, 4);
        value->kind = NUMBER;
        value->number = number;
        return at + 4;
    }
    case 0xcb: {
        if (left < 8) return NULL;
        uint64_t bits = big_endian_8(at);
        memcpy(&value->number, &bits, 8);
        value->kind = NUMBER;
        return at + 8;
    }
    case 0xcc:
    case 0xcd:
    case 0xce: {
        int bytes = 1 << (code - 0xcc);
        if (left < (size_t)bytes) return NULL;
        value->kind = INTEGER;
        value->integer = (int64_t)big_endian(at, bytes);
        return at + bytes;
    }
    case 0xcf: {
        if (left < 8) return NULL;
        uint64_t whole = big_endian_8(at);
        value->kind = whole > INT64_MAX ? BIG : INTEGER;
        value->integer = whole > INT64_MAX ? INT64_MAX : (int64_t)whole;
        value->number = (double)whole;
        return at + 8;
    }
    case 0xd0:
        if (left < 1) return NULL;
        value->kind = INTEGER;
        value->integer = (int8_t)at[0];
        return at + 1;
    case 0xd1:
        if (left < 2) return NULL;
        value->kind = INTEGER;
        value->integer = (int16_t)big_endian(at, 2);
        return at + 2;
    case 0xd2:
        if (left < 4) return NULL;
        value->kind = INTEGER;
        value->integer = (int32_t)big_endian(at, 4);
        return at + 4;
    case 0xd3:
        if (left < 8) return NULL;
        value->kind = INTEGER;
        value->integer = (int64_t)big_endian_8(at);
        return at + 8;
    case 0xd9:
    case 0xda:
    case 0xdb: {
        int of_size = 1 << (code - 0xd9);
        if (left < (size_t)of_size) return NULL;
        return read_text(at + of_size, end, value, big_endian(at, of_size));
    }
    case 0xdc:
    case 0xdd:
    case 0xde:
    case 0xdf: {
        int of_size = code & 1 ? 4 : 2;
        if (left < (size_t)of_size) return NULL;
        return read_many(at + of_size, end, value, big_endian(at, of_size), code >= 0xde, depth);
    }
    default: /* extension types, and what no writer writes */
        return NULL;
    }
}

/* Step into a map or an array that `read_value` has checked: the number of its pairs or elements. */
static const uint8_t *step_into(const uint8_t *at, uint64_t *many) {
    uint8_t code = *at++;
    if (code < 0xa0) {
        *many = code & 15;
        return at;
    }
    int of_size = code & 1 ? 4 : 2;
    *many = big_endian(at, of_size);
    return at + of_size;
}

#endif
