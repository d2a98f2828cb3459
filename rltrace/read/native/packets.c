/* Encodes rows of columns as packets of Perfetto: a packet that begins each span, and one that ends it.

   A caller has said beforehand how the spans of one name on one row begin; here times are written into packets, and
   arguments are turned from msgpack into annotations. What is as rare as a text that is no UTF-8 makes
   `rltrace_packets_encode` stop at its row, and the caller gives the arguments of this row anew, in order. Encoded
   arguments are those of a stranger: every read is checked against the end of their buffer.

   `perfetto_packets.py` of the exporters has the same in Python, byte by byte. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "arrays.h"
#include "msgpack.h"
#include "public.h"
#include "texts.h"

#define OPEN (-1)
#define ODD (-2)
#define DEEPEST 15     /* levels of values inside of an argument */
#define MOST_DOTS 32   /* of a key, which becomes nested names */
#define MOST_PAIRS 16  /* of a map inside of an argument */
#define MOST_COLUMNS 8 /* of what rows are grouped by */
#define FIRST_NAME 2   /* the number of the first name of an argument; 1 is the caller's */

typedef struct {
    int64_t at, size; /* in `beginnings` */
    int64_t row_size; /* of the field with the number of its row, behind the two bytes of its type */
    int32_t drops_phase;
} Beginning;

typedef struct {
    int64_t row;   /* the last one that had it */
    int64_t entry; /* which of its arguments it was there */
    int32_t name;  /* the place of its first part in `names`; NONE until that was said; ODD: it is no UTF-8 */
} Key;

typedef struct {
    int32_t key;
    Value value;
} Entry;

/* Intervals of one row of the timeline, as `NestedRow` in rows.py keeps them. */
typedef struct {
    int64_t *starts, *ends;
    int64_t horizon;
    int32_t many;
} Row;

typedef struct {
    Bytes rows; /* Row */
    int32_t is_flat;
} Place;

typedef struct {
    Bytes out, scratch, sequence;
    Bytes letters, beginnings; /* of all beginnings, and Beginning */
    Texts keys, names, shown; /* of arguments, their first parts, and values that are shown as a part of a name */
    Bytes of_keys;   /* Key */
    Bytes of_fields; /* int64_t: where the fields of each type begin in `fields`, and how many there are, in turn */
    Bytes fields;    /* int64_t: where the letters of a field begin in `field_letters`, and how many, in turn */
    Bytes field_letters;
    Bytes entries;
    int64_t serial;
    /* groups */
    Bytes groups[2]; /* int64_t: the values of each group, one behind the other */
    int32_t *tables[2];
    size_t slots[2], many_groups[2];
    Bytes places; /* Place */
    int32_t remembered;
} Packets;

/* ---------------------------------------------------------------- protobuf */

static inline size_t varint_size(uint64_t number) {
    size_t size = 1;
    while (number > 0x7f) {
        number >>= 7;
        size++;
    }
    return size;
}

static inline uint8_t *put_varint(uint8_t *at, uint64_t number) {
    while (number > 0x7f) {
        *at++ = (uint8_t)(number | 0x80);
        number >>= 7;
    }
    *at++ = (uint8_t)number;
    return at;
}

static inline int add_byte(Bytes *array, uint8_t byte) {
    if (room(array, 1)) return NO_MEMORY;
    array->data[array->size++] = byte;
    return SOUND;
}

static inline int add_integer(Bytes *array, uint8_t tag, uint64_t number) {
    if (room(array, 11)) return NO_MEMORY;
    uint8_t *at = array->data + array->size;
    *at++ = tag;
    array->size = (size_t)(put_varint(at, number) - array->data);
    return SOUND;
}

static inline int add_text(Bytes *array, uint8_t tag, const void *text, size_t length) {
    return add_integer(array, tag, length) || append(array, text, length) ? NO_MEMORY : SOUND;
}

/* Put a tag and a length before what was added since `begin`. */
static int wrap(Bytes *array, size_t begin, uint8_t tag) {
    size_t size = array->size - begin, head = 1 + varint_size(size);
    if (room(array, head)) return NO_MEMORY;
    memmove(array->data + begin + head, array->data + begin, size);
    array->data[begin] = tag;
    put_varint(array->data + begin + 1, size);
    array->size += head;
    return SOUND;
}

/* A time takes nine bytes whatever it is. */
static inline void put_time(uint8_t *at, uint64_t time) {
    for (int n = 0; n < 8; n++) at[n] = (uint8_t)(time >> 7 * n | 0x80);
    at[8] = (uint8_t)(time >> 56 & 0x7f);
}

static int is_utf8(const uint8_t *text, size_t length) {
    size_t at = 0;
    uint64_t word;
    while (at < length) {
        if (length - at >= 8) {
            memcpy(&word, text + at, 8);
            if (!(word & 0x8080808080808080ull)) {
                at += 8;
                continue;
            }
        }
        uint8_t code = text[at];
        if (code < 0x80) {
            at++;
            continue;
        }
        size_t more = code >= 0xf0 ? 3 : code >= 0xe0 ? 2 : 1;
        if (code < 0xc2 || code > 0xf4 || length - at <= more) return 0;
        uint8_t next = text[at + 1];
        if ((code == 0xe0 && next < 0xa0) || (code == 0xed && next > 0x9f) || (code == 0xf0 && next < 0x90) ||
            (code == 0xf4 && next > 0x8f))
            return 0;
        for (size_t n = 1; n <= more; n++)
            if ((text[at + n] & 0xc0) != 0x80) return 0;
        at += more + 1;
    }
    return 1;
}

/* ---------------------------------------------------------------- rows that are encoded */

/* What a caller gives of rows, as addresses of its columns. */
typedef struct {
    int64_t many;
    const int32_t *beginnings;
    const int64_t *starts_ns, *ends_ns;
    int64_t offset_ns;
    const int64_t *args_at;
    const int32_t *begin_bytes, *late_bytes, *types; /* begin_bytes: -1 - n for n bytes of `anew` */
    const uint8_t *blobs;
    int64_t blobs_size;
    const uint8_t *anew; /* arguments that were given anew: no key is there twice, and none of what is odd */
    int64_t anew_size;
    int64_t many_arrows; /* rows with arrows, in order */
    const int64_t *arrow_rows, *out_ends, *in_ends; /* where in `arrows` what leaves and what arrives ends */
    const uint8_t *arrows;
} Rows;

/* The arguments of a row. */
typedef struct {
    const uint8_t *at;
    size_t begin_bytes, late_bytes;
    int is_clean; /* they were given anew */
} Args;

static int args_of(const Rows *rows, int64_t row, Args *args) {
    int64_t at = rows->args_at[row], begin_bytes = rows->begin_bytes[row], late_bytes = rows->late_bytes[row];
    args->is_clean = begin_bytes < 0;
    if (args->is_clean) begin_bytes = -1 - begin_bytes, late_bytes = 0;
    int64_t size = args->is_clean ? rows->anew_size : rows->blobs_size;
    if (at < 0 || at > size || late_bytes < 0 || begin_bytes + late_bytes > size - at) return UNSOUND;
    args->at = (args->is_clean ? rows->anew : rows->blobs) + at;
    args->begin_bytes = (size_t)begin_bytes;
    args->late_bytes = (size_t)late_bytes;
    return SOUND;
}

/* ---------------------------------------------------------------- arguments */

static const uint8_t *part_of(const uint8_t *key, const uint8_t *end, int dots) {
    const uint8_t *dot = dots < MOST_DOTS && key < end ? memchr(key, '.', (size_t)(end - key)) : NULL;
    return dot ? dot : end;
}

/* Add a value below what a key says behind its first dot; `begins` of the names go to `wraps`. */
static int add_inner(Bytes *out, const uint8_t *key, const uint8_t *end, int dots, size_t *begins, int *many) {
    *many = 0;
    while (key < end) { /* at a dot */
        const uint8_t *name = key + 1, *behind = part_of(name, end, ++dots);
        begins[(*many)++] = out->size;
        if (add_text(out, 0x52, name, (size_t)(behind - name))) return NO_MEMORY;
        key = behind;
    }
    return SOUND;
}

static int wrap_inner(Bytes *out, const size_t *begins, int many) {
    while (many--)
        if (wrap(out, begins[many], 0x5a)) return NO_MEMORY;
    return SOUND;
}

static int add_value(Bytes *out, const Value *value, const uint8_t *end, int level, int is_clean);

/* Add the pairs of a map, or the elements of an array, that is inside of an argument. */
static int add_many(Bytes *out, const Value *value, const uint8_t *end, int level, int is_clean) {
    uint64_t many;
    const uint8_t *at = step_into(value->begin, &many);
    int is_map = value->kind == MAP;
    Value keys[MOST_PAIRS];
    if (is_map && !is_clean && many > MOST_PAIRS) return ODD;
    for (uint64_t n = 0; n < many; n++) {
        Value key, inner;
        size_t begins[MOST_DOTS + 1], begin = out->size;
        int dots = 0, state;
        if (is_map) {
            if (!(at = read_value(at, end, &key, 1)) || key.kind != TEXT || !is_utf8(key.text, key.length)) return ODD;
            if (!is_clean) {
                for (uint64_t m = 0; m < n; m++)
                    if (keys[m].length == key.length && !memcmp(keys[m].text, key.text, key.length)) return ODD;
                keys[n] = key;
            }
            const uint8_t *behind = key.text + key.length, *first = part_of(key.text, behind, dots);
            begins[0] = begin;
            if (add_text(out, 0x52, key.text, (size_t)(first - key.text))) return NO_MEMORY;
            if (add_inner(out, first, behind, 0, begins + 1, &dots)) return NO_MEMORY;
            dots++;
        }
        if (!(at = read_value(at, end, &inner, 1))) return ODD;
        if ((state = add_value(out, &inner, end, level + 1, is_clean))) return state;
        if (is_map ? wrap_inner(out, begins, dots) : wrap(out, begin, 0x62)) return NO_MEMORY;
    }
    return SOUND;
}

/* Add the value of an annotation. */
static int add_value(Bytes *out, const Value *value, const uint8_t *end, int level, int is_clean) {
    switch (value->kind) {
    case INTEGER:
        return add_integer(out, 0x20, (uint64_t)value->integer);
    case BIG:
        return add_integer(out, 0x18, big_endian_8(value->begin + 1));
    case TRUTH:
        return add_integer(out, 0x10, (uint64_t)value->integer);
    case NIL:
        return add_text(out, 0x32, "None", 4);
    case TEXT:
        if (!is_utf8(value->text, value->length)) return ODD;
        return add_text(out, 0x32, value->text, value->length);
    case NUMBER: {
        uint64_t bits;
        memcpy(&bits, &value->number, 8);
        if (room(out, 9)) return NO_MEMORY;
        out->data[out->size++] = 0x29;
        for (int n = 0; n < 8; n++) out->data[out->size++] = (uint8_t)(bits >> 8 * n);
        return SOUND;
    }
    default:
        if (value->begin[0] >= 0xc4 && value->begin[0] <= 0xc6) return ODD; /* bytes */
        if (level >= DEEPEST && !is_clean) return ODD;
        if (value->is_empty) return add_text(out, 0x32, value->kind == MAP ? "{}" : "[]", 2);
        return add_many(out, value, end, level, is_clean);
    }
}

static int32_t key_of(Packets *packets, const uint8_t *text, uint32_t length) {
    size_t before = packets->keys.many;
    int32_t key = intern(&packets->keys, text, length);
    if (key == NONE || packets->keys.many == before) return key;
    Key new = {-1, 0, is_utf8(text, length) ? NONE : ODD};
    return append(&packets->of_keys, &new, sizeof new) ? NONE : key;
}

/* Add an argument, or replace the value of the one that has its key. */
static int add_entry(Packets *packets, const uint8_t *text, uint32_t length, const Value *value) {
    int32_t number = key_of(packets, text, length);
    if (number == NONE) return NO_MEMORY;
    Key *key = (Key *)packets->of_keys.data + number;
    if (key->name == ODD) return ODD;
    if (key->row == packets->serial) {
        ((Entry *)packets->entries.data)[key->entry].value = *value;
        return SOUND;
    }
    Entry entry = {number, *value};
    key->row = packets->serial;
    key->entry = (int64_t)(packets->entries.size / sizeof(Entry));
    return append(&packets->entries, &entry, sizeof entry);
}

static int add_map(Packets *packets, const uint8_t *at, const uint8_t *end) {
    Value value, inner;
    if (!read_value(at, end, &value, 1)) return ODD;
    if (value.kind == NIL) return SOUND;
    if (value.kind != MAP) return ODD;
    uint64_t many;
    at = step_into(at, &many);
    for (uint64_t n = 0; n < many; n++) {
        int state;
        if (!(at = read_value(at, end, &value, 2)) || value.kind != TEXT) return ODD;
        if (!(at = read_value(at, end, &inner, 2))) return ODD;
        if ((state = add_entry(packets, value.text, value.length, &inner))) return state;
    }
    return SOUND;
}

/* Add what a typed span has: an array of the values of its fields, and a map of more. */
static int add_typed(Packets *packets, int32_t type, const uint8_t *at, const uint8_t *end) {
    Value value;
    if (!read_value(at, end, &value, 1) || value.kind != OTHER || *at < 0x90) return ODD;
    if (type < 0 || (size_t)type >= packets->of_fields.size / 16) return ODD;
    const int64_t *of_type = (const int64_t *)packets->of_fields.data + 2 * type;
    const int64_t *fields = (const int64_t *)packets->fields.data + 2 * of_type[0];
    uint64_t many;
    at = step_into(at, &many);
    for (uint64_t n = 0; n < many; n++) {
        const uint8_t *begin = at;
        int state = SOUND;
        if (!(at = read_value(at, end, &value, 2))) return ODD;
        if (n + 1 == many) state = add_map(packets, begin, end);
        else if (n < (uint64_t)of_type[1])
            state = add_entry(packets, packets->field_letters.data + fields[2 * n], (uint32_t)fields[2 * n + 1], &value);
        if (state) return state;
    }
    return SOUND;
}

/* Find the arguments of a row, each once. */
static int collect(Packets *packets, const Args *args, int32_t type) {
    packets->entries.size = 0;
    packets->serial++;
    int state = SOUND;
    const uint8_t *at = args->at, *late = at + args->begin_bytes;
    if (args->begin_bytes) {
        int is_typed = (*at & 0xf0) == 0x90 || *at == 0xdc || *at == 0xdd;
        state = is_typed ? add_typed(packets, type, at, late) : add_map(packets, at, late);
    }
    return state || !args->late_bytes ? state : add_map(packets, late, late + args->late_bytes);
}

/* Find the number of a key's first part, which is the name of its annotation, and say it if it is new. */
static int name_key(Packets *packets, int32_t number) {
    uint32_t length;
    const uint8_t *text = text_at(&packets->keys, number, &length);
    const uint8_t *behind = part_of(text, text + length, 0);
    size_t before = packets->names.many;
    int32_t name = intern(&packets->names, text, (uint32_t)(behind - text));
    if (name == NONE) return NO_MEMORY;
    ((Key *)packets->of_keys.data)[number].name = name;
    if (packets->names.many == before) return SOUND;
    Bytes *out = &packets->out;
    size_t begin = out->size;
    if (append(out, packets->sequence.data, packets->sequence.size)) return NO_MEMORY;
    size_t inside = out->size;
    if (add_integer(out, 0x08, (uint64_t)name + FIRST_NAME) || add_text(out, 0x12, text, (size_t)(behind - text)))
        return NO_MEMORY;
    return wrap(out, inside, 0x1a) || wrap(out, inside, 0x62) || wrap(out, begin, 0x0a) ? NO_MEMORY : SOUND;
}

/* Add annotations of what was collected. */
static int annotate(Packets *packets, const uint8_t *end, int drops_phase, int is_clean) {
    Bytes *out = &packets->scratch;
    const Entry *entries = (const Entry *)packets->entries.data;
    size_t many = packets->entries.size / sizeof(Entry);
    for (size_t n = 0; n < many; n++) {
        const Entry *entry = &entries[n];
        uint32_t length;
        const uint8_t *text = text_at(&packets->keys, entry->key, &length);
        if (drops_phase && length == 5 && !memcmp(text, "phase", 5)) continue;
        const Key *key = (const Key *)packets->of_keys.data + entry->key;
        if (key->name == NONE && name_key(packets, entry->key)) return NO_MEMORY;
        size_t begins[MOST_DOTS + 1], begin = out->size;
        int dots, state;
        const uint8_t *behind = text + length;
        if (add_integer(out, 0x08, (uint64_t)key->name + FIRST_NAME)) return NO_MEMORY;
        if (add_inner(out, part_of(text, behind, 0), behind, 0, begins, &dots)) return NO_MEMORY;
        if ((state = add_value(out, &entry->value, end, 1, is_clean))) return state;
        if (wrap_inner(out, begins, dots) || wrap(out, begin, 0x22)) return NO_MEMORY;
    }
    return SOUND;
}

/* ---------------------------------------------------------------- packets */

/* Add a packet with a time and a TrackEvent of two parts. */
static int add_packet(Packets *packets, uint64_t time, const uint8_t *head, size_t head_size, const uint8_t *tail,
                      size_t tail_size) {
    Bytes *out = &packets->out;
    size_t event = head_size + tail_size;
    size_t size = packets->sequence.size + 1 + varint_size(event) + event;
    if (room(out, 32 + size)) return NO_MEMORY;
    uint8_t *at = out->data + out->size;
    *at++ = 0x0a;
    at = put_varint(at, 10 + size);
    *at++ = 0x40;
    put_time(at, time);
    at += 9;
    memcpy(at, packets->sequence.data, packets->sequence.size);
    at += packets->sequence.size;
    *at++ = 0x5a;
    at = put_varint(at, event);
    memcpy(at, head, head_size);
    if (tail_size) memcpy(at + head_size, tail, tail_size);
    out->size = (size_t)(at + event - out->data);
    return SOUND;
}

static int encode_row(Packets *packets, const Rows *rows, int64_t row, int64_t arrow) {
    if (rows->beginnings[row] < 0 || (size_t)rows->beginnings[row] >= packets->beginnings.size / sizeof(Beginning))
        return UNSOUND;
    const Beginning *beginning = (const Beginning *)packets->beginnings.data + rows->beginnings[row];
    const uint8_t *event = packets->letters.data + beginning->at;
    Bytes *scratch = &packets->scratch;
    const uint8_t *arriving = NULL;
    size_t arriving_size = 0;
    int state;
    scratch->size = 0;
    if (append(scratch, event, (size_t)beginning->size)) return NO_MEMORY;
    if (arrow >= 0) {
        int64_t begin = arrow ? rows->in_ends[arrow - 1] : 0;
        if (append(scratch, rows->arrows + begin, (size_t)(rows->out_ends[arrow] - begin))) return NO_MEMORY;
        arriving = rows->arrows + rows->out_ends[arrow];
        arriving_size = (size_t)(rows->in_ends[arrow] - rows->out_ends[arrow]);
    }
    Args args;
    if (args_of(rows, row, &args)) return UNSOUND;
    if (args.begin_bytes || args.late_bytes) {
        const uint8_t *end = args.at + args.begin_bytes + args.late_bytes;
        if ((state = collect(packets, &args, rows->types[row])) ||
            (state = annotate(packets, end, beginning->drops_phase, args.is_clean)))
            return state;
    }
    uint64_t start = (uint64_t)rows->starts_ns[row] + (uint64_t)rows->offset_ns;
    uint64_t end = (uint64_t)rows->ends_ns[row] + (uint64_t)rows->offset_ns;
    if (rows->ends_ns[row] == OPEN)
        return add_packet(packets, start, scratch->data, scratch->size, arriving, arriving_size);
    if (rows->ends_ns[row] == rows->starts_ns[row]) {
        scratch->data[1] = 3; /* an instant */
        return add_packet(packets, start, scratch->data, scratch->size, arriving, arriving_size);
    }
    if ((state = add_packet(packets, start, scratch->data, scratch->size, NULL, 0))) return state;
    scratch->data[1] = 2; /* an end, which has its row */
    scratch->size = 2 + (size_t)beginning->row_size;
    return add_packet(packets, end, scratch->data, scratch->size, arriving, arriving_size);
}

/* ---------------------------------------------------------------- what Python calls */

/* Make an encoder for one sequence of packets, given the fields that each packet has of it. */
PUBLIC Packets *rltrace_packets_new(const uint8_t *sequence, uint32_t length, int32_t remembered) {
    Packets *packets = calloc(1, sizeof *packets);
    if (packets && append(&packets->sequence, sequence, length)) {
        free(packets);
        return NULL;
    }
    if (packets) packets->remembered = remembered;
    return packets;
}

static void forget_texts(Texts *texts) {
    free_texts(texts);
    memset(texts, 0, sizeof *texts);
}

static void forget_groups(Packets *packets, int which) {
    free(packets->groups[which].data);
    free(packets->tables[which]);
    memset(&packets->groups[which], 0, sizeof(Bytes));
    packets->tables[which] = NULL;
    packets->slots[which] = packets->many_groups[which] = 0;
}

/* Forget the names of arguments, beginnings, and groups of the second kind. */
PUBLIC void rltrace_packets_restart(Packets *packets) {
    forget_texts(&packets->keys);
    forget_texts(&packets->names);
    packets->of_keys.size = packets->letters.size = packets->beginnings.size = 0;
    forget_groups(packets, 1);
}

PUBLIC void rltrace_packets_delete(Packets *packets) {
    if (!packets) return;
    rltrace_packets_restart(packets);
    forget_groups(packets, 0);
    forget_texts(&packets->shown);
    for (size_t n = 0; n < packets->places.size / sizeof(Place); n++) {
        Place *place = (Place *)packets->places.data + n;
        for (size_t m = 0; m < place->rows.size / sizeof(Row); m++) {
            free(((Row *)place->rows.data)[m].starts);
            free(((Row *)place->rows.data)[m].ends);
        }
        free(place->rows.data);
    }
    Bytes *arrays[] = {&packets->out,       &packets->scratch,       &packets->sequence, &packets->letters,
                       &packets->of_keys,   &packets->of_fields,     &packets->fields,   &packets->entries,
                       &packets->beginnings, &packets->field_letters, &packets->places};
    for (size_t n = 0; n < sizeof arrays / sizeof *arrays; n++) free(arrays[n]->data);
    free(packets);
}

/* Say the fields of the next typed span: their letters one behind the other, and where each of them ends. */
PUBLIC int rltrace_packets_type(Packets *packets, int32_t many, const uint8_t *letters, const int64_t *ends) {
    int64_t of_type[2] = {(int64_t)(packets->fields.size / 16), many};
    int64_t base = (int64_t)packets->field_letters.size, begin = 0;
    for (int32_t n = 0; n < many; n++) {
        int64_t field[2] = {base + begin, ends[n] - begin};
        if (append(&packets->fields, field, sizeof field)) return NO_MEMORY;
        begin = ends[n];
    }
    return append(&packets->field_letters, letters, (size_t)begin) || append(&packets->of_fields, of_type, sizeof of_type);
}

/* Say how spans of one name on one row begin: the bytes of the event, whose first two are its type, and whose next
   ones, `row_size` many, are its row. The next beginning has the next number. */
PUBLIC int rltrace_packets_beginning(Packets *packets, const uint8_t *event, int64_t size, int64_t row_size,
                                     int32_t drops_phase) {
    Beginning beginning = {(int64_t)packets->letters.size, size, row_size, drops_phase};
    if (size < 2 || row_size < 0 || row_size > size - 2) return UNSOUND;
    return append(&packets->letters, event, (size_t)size) || append(&packets->beginnings, &beginning, sizeof beginning)
               ? NO_MEMORY
               : SOUND;
}

/* Encode rows from `*row` on until there are `enough` bytes; `*row` is the one to go on with. ODD: that its arguments
   have to be given anew. */
PUBLIC int rltrace_packets_encode(Packets *packets, const Rows *rows, int64_t *row, uint64_t enough) {
    int64_t arrow = 0;
    while (arrow < rows->many_arrows && rows->arrow_rows[arrow] < *row) arrow++;
    int state = SOUND;
    for (; *row < rows->many && packets->out.size < enough; ++*row) {
        int has_arrow = arrow < rows->many_arrows && rows->arrow_rows[arrow] == *row;
        if ((state = encode_row(packets, rows, *row, has_arrow ? arrow : -1))) return state;
        arrow += has_arrow;
    }
    return SOUND;
}

/* The packets so far; they are forgotten. */
PUBLIC uint64_t rltrace_packets_take(Packets *packets, const uint8_t **data) {
    uint64_t size = packets->out.size;
    *data = packets->out.data;
    packets->out.size = 0;
    return size;
}

/* How many names of arguments there are. */
PUBLIC int64_t rltrace_packets_names(const Packets *packets) { return (int64_t)packets->keys.many; }

/* ---------------------------------------------------------------- groups */

static int regroup(Packets *packets, int which, int32_t columns, size_t slots) {
    int32_t *table = malloc(slots * sizeof *table);
    if (!table) return NO_MEMORY;
    for (size_t n = 0; n < slots; n++) table[n] = NONE;
    const int64_t *groups = (const int64_t *)packets->groups[which].data;
    for (size_t n = 0; n < packets->many_groups[which]; n++) {
        uint64_t hash = 0;
        for (int32_t column = 0; column < columns; column++) {
            hash = (hash ^ (uint64_t)groups[n * (size_t)columns + (size_t)column]) * 0x9e3779b97f4a7c15ull;
            hash ^= hash >> 32;
        }
        size_t slot = hash & (slots - 1);
        while (table[slot] != NONE) slot = (slot + 1) & (slots - 1);
        table[slot] = (int32_t)n;
    }
    free(packets->tables[which]);
    packets->tables[which] = table;
    packets->slots[which] = slots;
    return SOUND;
}

/* Number rows by what they have in some columns: equal ones have the same number. `first_rows` gets the row of each
   group that is new. Returns how many groups there are now; -1 if memory is short. */
PUBLIC int64_t rltrace_packets_group(Packets *packets, int32_t which, int32_t columns, const int64_t *const *values,
                                     int64_t many, int32_t *numbers, int64_t *first_rows) {
    if (which < 0 || which > 1 || columns < 1 || columns > MOST_COLUMNS) return -1;
    size_t new = 0, bytes = (size_t)columns * 8;
    for (int64_t row = 0; row < many; row++) {
        int64_t own[MOST_COLUMNS];
        uint64_t hash = 0;
        for (int32_t column = 0; column < columns; column++) {
            own[column] = values[column][row];
            hash = (hash ^ (uint64_t)own[column]) * 0x9e3779b97f4a7c15ull;
            hash ^= hash >> 32;
        }
        if (packets->many_groups[which] * 2 >= packets->slots[which] &&
            regroup(packets, which, columns, packets->slots[which] ? packets->slots[which] * 2 : 256))
            return -1;
        size_t slot = hash & (packets->slots[which] - 1);
        int32_t *table = packets->tables[which];
        while (table[slot] != NONE && memcmp(packets->groups[which].data + (size_t)table[slot] * bytes, own, bytes))
            slot = (slot + 1) & (packets->slots[which] - 1);
        if (table[slot] == NONE) {
            if (packets->many_groups[which] >= INT32_MAX || append(&packets->groups[which], own, bytes)) return -1;
            table[slot] = (int32_t)packets->many_groups[which]++;
            first_rows[new++] = row;
        }
        numbers[row] = table[slot];
    }
    return (int64_t)packets->many_groups[which];
}

/* ---------------------------------------------------------------- rows of the timeline */

static int new_row(Packets *packets, Place *place) {
    Row row = {NULL, NULL, -1, 0};
    if (!place->is_flat) {
        size_t bytes = ((size_t)packets->remembered + 1) * sizeof(int64_t);
        row.starts = malloc(bytes);
        row.ends = malloc(bytes);
    }
    if (!place->is_flat && (!row.starts || !row.ends)) {
        free(row.starts);
        free(row.ends);
        return NO_MEMORY;
    }
    return append(&place->rows, &row, sizeof row);
}

/* The index of the first element that is larger. */
static int32_t behind(const int64_t *sorted, int32_t many, int64_t value) {
    int32_t low = 0, high = many;
    if (many && sorted[many - 1] <= value) return many;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (sorted[middle] <= value) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Put a span on a row, if it fits. */
static int takes(Row *row, int64_t start, int64_t end, int32_t remembered) {
    if (!row->starts) {
        if (start < row->horizon) return 0;
        row->horizon = end;
        return 1;
    }
    if (start < row->horizon) return 0;
    int32_t first = behind(row->ends, row->many, start), after = behind(row->starts, row->many, end);
    if (first < after && (row->starts[first] <= start || row->ends[after - 1] > end)) return 0;
    if (first > after) after = first; /* a slice of Python's ends at its beginning at least */
    size_t rest = (size_t)(row->many - after) * sizeof(int64_t);
    memmove(row->starts + first + 1, row->starts + after, rest);
    memmove(row->ends + first + 1, row->ends + after, rest);
    row->starts[first] = start;
    row->ends[first] = end;
    row->many += first + 1 - after;
    if (row->many > remembered) {
        int32_t forgotten = remembered / 2;
        row->horizon = row->ends[forgotten - 1];
        row->many -= forgotten;
        memmove(row->starts, row->starts + forgotten, (size_t)row->many * sizeof(int64_t));
        memmove(row->ends, row->ends + forgotten, (size_t)row->many * sizeof(int64_t));
    }
    return 1;
}

/* Put spans onto the rows of a place, and say for each which; a place that is new begins without a row. */
PUBLIC int rltrace_packets_place(Packets *packets, int32_t number, int32_t is_flat, const int64_t *starts,
                                 const int64_t *ends, int64_t many, int32_t *found) {
    if (number < 0 || (size_t)number > packets->places.size / sizeof(Place) || packets->remembered < 2) return UNSOUND;
    if ((size_t)number == packets->places.size / sizeof(Place)) {
        Place new;
        memset(&new, 0, sizeof new);
        new.is_flat = is_flat;
        if (append(&packets->places, &new, sizeof new)) return NO_MEMORY;
    }
    Place *place = (Place *)packets->places.data + number;
    for (int64_t n = 0; n < many; n++) {
        int32_t at = 0;
        while ((size_t)at < place->rows.size / sizeof(Row) &&
               !takes((Row *)place->rows.data + at, starts[n], ends[n], packets->remembered))
            at++;
        if ((size_t)at == place->rows.size / sizeof(Row)) {
            if (new_row(packets, place)) return NO_MEMORY;
            takes((Row *)place->rows.data + at, starts[n], ends[n], packets->remembered);
        }
        found[n] = at;
    }
    return SOUND;
}

/* ---------------------------------------------------------------- texts that are shown */

/* Give the number of the text that each of some rows has as an argument; NONE if it has none, or nothing; ODD if only
   Python knows it. */
PUBLIC int rltrace_packets_texts(Packets *packets, const Rows *rows, const uint8_t *name, uint32_t length,
                                 const int64_t *chosen, int64_t many, int32_t *found) {
    for (int64_t n = 0; n < many; n++) {
        int64_t row = chosen[n];
        found[n] = ODD;
        if (row < 0 || row >= rows->many) return UNSOUND;
        Args args;
        if (args_of(rows, row, &args)) return UNSOUND;
        int state = collect(packets, &args, rows->types[row]);
        if (state == NO_MEMORY) return state;
        if (state) continue;
        int32_t key = key_of(packets, name, length);
        if (key == NONE) return NO_MEMORY;
        const Key *own = (const Key *)packets->of_keys.data + key;
        found[n] = NONE;
        if (own->row != packets->serial) continue;
        const Value *value = &((const Entry *)packets->entries.data)[own->entry].value;
        if (value->kind == NIL) continue;
        if (value->kind != TEXT || !is_utf8(value->text, value->length)) {
            found[n] = ODD;
            continue;
        }
        if ((found[n] = intern(&packets->shown, value->text, value->length)) == NONE) return NO_MEMORY;
    }
    return SOUND;
}

/* The texts so far: their letters, and where each of them ends. */
PUBLIC int64_t rltrace_packets_shown(const Packets *packets, const uint8_t **letters, const int64_t **ends) {
    *letters = packets->shown.letters.data;
    *ends = (const int64_t *)packets->shown.ends.data;
    return (int64_t)packets->shown.many;
}
