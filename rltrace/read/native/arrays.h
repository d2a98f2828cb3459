/* Arrays that grow. */

#ifndef ARRAYS_H
#define ARRAYS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NONE (-1)

enum { SOUND = 0, UNSOUND = 1, NO_MEMORY = 2 };

typedef struct {
    uint8_t *data;
    size_t size, capacity; /* in bytes */
    size_t likely; /* capacity to begin with */
} Bytes;

static int grow(Bytes *array, size_t more) {
    if (more > SIZE_MAX / 4 - array->size) return NO_MEMORY;
    size_t capacity = array->capacity ? array->capacity : array->likely ? array->likely : 1024;
    while (capacity < array->size + more) capacity *= 2;
    uint8_t *data = realloc(array->data, capacity);
    if (!data) return NO_MEMORY;
    array->data = data;
    array->capacity = capacity;
    return SOUND;
}

static inline int room(Bytes *array, size_t more) {
    return array->capacity - array->size >= more ? SOUND : grow(array, more);
}

static int append(Bytes *array, const void *data, size_t size) {
    if (room(array, size)) return NO_MEMORY;
    if (size) memcpy(array->data + array->size, data, size);
    array->size += size;
    return SOUND;
}

#define PUT(array, type, value) (*(type *)((array).data + (array).size) = (type)(value), (array).size += sizeof(type))

#endif
