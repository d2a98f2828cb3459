/* Texts by number: each is kept once, if it is interned.

   What a program says it says again in the same order, such as the owners of memory at each boundary: the text that has
   followed another one mostly follows it the next time too, and is looked at first. */

#ifndef TEXTS_H
#define TEXTS_H

#include "arrays.h"

typedef struct {
    Bytes letters;  /* of all texts, one behind the other */
    Bytes ends;     /* int64_t: where each text ends in `letters` */
    Bytes follows;  /* int32_t: the number of the text that was asked for behind each; at first its own */
    int32_t *table; /* numbers of texts by their hashes, or NONE */
    size_t slots, many;
    int32_t last; /* the text that was asked for last, if there is any */
} Texts;

static inline uint64_t hash_of(const uint8_t *text, uint32_t length) {
    uint64_t hash = 0x9e3779b97f4a7c15ull ^ length, word;
    uint32_t at = 0;
    for (; at + 8 <= length; at += 8) {
        memcpy(&word, text + at, 8);
        hash = (hash ^ word) * 0xff51afd7ed558ccdull;
        hash ^= hash >> 32;
    }
    word = 0;
    if (at < length) memcpy(&word, text + at, length - at);
    hash = (hash ^ word) * 0xff51afd7ed558ccdull;
    return hash ^ hash >> 29;
}

static inline int is_same(const uint8_t *one, const uint8_t *other, uint32_t length) {
    uint64_t left, right;
    if (length < 8) {
        for (uint32_t n = 0; n < length; n++)
            if (one[n] != other[n]) return 0;
        return 1;
    }
    for (uint32_t at = 0; at + 8 < length; at += 8) {
        memcpy(&left, one + at, 8);
        memcpy(&right, other + at, 8);
        if (left != right) return 0;
    }
    memcpy(&left, one + length - 8, 8);
    memcpy(&right, other + length - 8, 8);
    return left == right;
}

static inline const uint8_t *text_at(const Texts *texts, int32_t number, uint32_t *length) {
    const int64_t *ends = (const int64_t *)texts->ends.data;
    int64_t begin = number ? ends[number - 1] : 0;
    *length = (uint32_t)(ends[number] - begin);
    return texts->letters.data + begin;
}

static int rehash(Texts *texts, size_t slots) {
    int32_t *table = malloc(slots * sizeof *table);
    if (!table) return NO_MEMORY;
    for (size_t n = 0; n < slots; n++) table[n] = NONE;
    for (size_t n = 0; n < texts->many; n++) {
        uint32_t length;
        const uint8_t *text = text_at(texts, (int32_t)n, &length);
        size_t slot = hash_of(text, length) & (slots - 1);
        while (table[slot] != NONE) slot = (slot + 1) & (slots - 1);
        table[slot] = (int32_t)n;
    }
    free(texts->table);
    texts->table = table;
    texts->slots = slots;
    return SOUND;
}

static inline int is_text(const Texts *texts, int32_t number, const uint8_t *text, uint32_t length) {
    uint32_t known_length;
    const uint8_t *known = text_at(texts, number, &known_length);
    return known_length == length && is_same(known, text, length);
}

/* Add a text, whether it is new or not, and return its number; NONE if memory is short. */
static int32_t put_text(Texts *texts, const uint8_t *text, uint32_t length) {
    if (texts->many >= INT32_MAX || room(&texts->ends, 8) || append(&texts->letters, text, length)) return NONE;
    PUT(texts->ends, int64_t, texts->letters.size);
    return (int32_t)texts->many++;
}

/* Return the number of a text, a new one if it is new; NONE if memory is short. */
static int32_t number_of(Texts *texts, const uint8_t *text, uint32_t length) {
    if (texts->many * 2 >= texts->slots && rehash(texts, texts->slots ? texts->slots * 2 : 1024)) return NONE;
    size_t slot = hash_of(text, length) & (texts->slots - 1);
    for (; texts->table[slot] != NONE; slot = (slot + 1) & (texts->slots - 1))
        if (is_text(texts, texts->table[slot], text, length)) return texts->table[slot];
    int32_t number = room(&texts->follows, 4) ? NONE : put_text(texts, text, length);
    if (number == NONE) return NONE;
    PUT(texts->follows, int32_t, number);
    return texts->table[slot] = number;
}

/* Return the same, and remember that it was asked for. */
static inline int32_t intern(Texts *texts, const uint8_t *text, uint32_t length) {
    if (texts->many) {
        int32_t likely = ((int32_t *)texts->follows.data)[texts->last];
        if (is_text(texts, likely, text, length)) return texts->last = likely;
    }
    int32_t number = number_of(texts, text, length);
    if (number == NONE) return NONE;
    ((int32_t *)texts->follows.data)[texts->last] = number;
    return texts->last = number;
}

static void free_texts(Texts *texts) {
    free(texts->letters.data);
    free(texts->ends.data);
    free(texts->follows.data);
    free(texts->table);
}

#endif
