/* Decodes the segments of one process into columns: joins begins with ends, interns texts, picks out arguments.

   It knows the common case only. Whatever is damaged, makes no sense, or is as rare as a record of 65 elements, makes
   `rltrace_decode` return UNSOUND, and the caller reads the whole process in Python. So what this decoder returns is
   what the Python reader returns, and no byte of a stranger is believed: every read is checked against the end of the
   segment, every size against what is left.

   Plain C99 without Python's API, called through ctypes: one build serves every Python. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "arrays.h"
#include "msgpack.h"
#include "public.h"
#include "texts.h"

#ifndef SOURCE
#define SOURCE 0
#endif

#define MOST_ELEMENTS 64
#define MOST_ARGUMENTS 40
#define LONGEST_KEY 31
#define MOST_LANES 63
#define OPEN (-1)
#define MISSING INT64_MIN
#define BYTES_OF_ROW 128 /* about so many has a span, its beginning and its end */
#define MOST_LIKELY 65536
#define BEYOND ((int64_t)1 << 56)

/* ---------------------------------------------------------------- what is decoded */

/* Kinds of arguments. All but the last two have a column; a rare number, or a map of numbers by their names, is added
   to the numbers that few rows have. */
enum { WHOLE_NUMBER, DECIMAL, ONLY_TEXT, AS_TEXT, IS_TRUE, IS_TRUTHY, RARE_NUMBER, NUMBERS };

typedef struct {
    uint8_t key[LONGEST_KEY + 1];
    uint32_t length;
    int32_t kind;
    int32_t next;        /* another one of the same length */
    int64_t least, most; /* of a number: what lies beyond is left to Python */
    uint64_t row;        /* the last one that had it, if it is one of the last two kinds */
} Argument;

typedef struct {
    int64_t number;
    int32_t name;
    uint8_t is_automatic;
    int32_t fields;
    int32_t *arguments; /* the argument of each field, or NONE */
} Type;

/* A span that is open, or an end that was read before its beginning. */
typedef struct {
    int64_t start_ns, end_ns, thread, task;
    uint64_t barred;      /* the lanes that it cannot be on */
    uint64_t place;       /* in the order of the first spans with its start that are open */
    uint64_t began;       /* in the order of all */
    const uint8_t *args;  /* encoded: of an early end, the late ones; in the segment, or a copy of its own */
    uint8_t *copy;
    uint32_t args_bytes;
    int32_t name, type;   /* type: index of its declaration, or NONE */
    int32_t stack;
    int32_t below, above; /* in its stack */
    int32_t next;         /* in its bucket, or in the list of free slots */
    int32_t older, newer; /* among all open ones */
    int32_t first_flow, last_flow;
    uint8_t is_automatic, is_early;
} Slot;

typedef struct {
    int64_t thread, task;
    int32_t top, next;
} Stack;

typedef struct {
    int32_t key, next;
    uint8_t is_out;
} Flow;

enum { AUTOMATIC = 1, ODD = 2, FINISHED = 4, GOES_ON = 8 }; /* flags of a span */
enum { WHOLE_SAMPLE = 1, BEYOND_BYTES = 2 };   /* flags of a sample */

typedef struct {
    Bytes name, thread, task, lane, start_ns, end_ns, flags, type, args_at, begin_bytes, late_bytes;
    Bytes arguments[MOST_ARGUMENTS];
    Bytes blobs; /* encoded arguments, one span's behind the other's */
    Bytes sample_name, sample_thread, sample_ns, sample_value, sample_flags;
    Bytes flow_row, flow_key, flow_is_out;
    Bytes number_row, number_of, number_name, number_value;
} Columns;

typedef struct {
    Texts texts; /* names, and texts that are arguments */
    Texts keys;  /* of arrows, of which nearly every one has its own: to look for it among them would be in vain */
    Argument arguments[MOST_ARGUMENTS];
    int32_t of_length[LONGEST_KEY + 1];
    int32_t many_arguments;
    Bytes types; /* Type */
    Columns columns;
    int64_t rows, row_room; /* of spans: how many there are, and for how many there is room */
    uint64_t all_rows, maps; /* how many spans, and how many maps of numbers, there have been */
    Bytes name_maps;         /* uint64_t: of each text, the last map of numbers that it is a name in */
    Bytes slots, stacks, flows; /* Slot, Stack, Flow */
    int32_t free_slot, free_stack, free_flow;
    int32_t oldest, newest; /* open spans and early ends */
    int32_t *buckets, *stack_buckets;
    size_t many_buckets, many_open, many_stack_buckets, many_stacks, many_early;
    uint64_t began, began_before; /* how many spans began, and how many did before this segment */
    uint64_t work;                /* steps over open spans */
    int64_t thread;
    int64_t first_ns, last_ns;
    size_t last_rows; /* of the columns before */
    size_t likely_rows; /* of the segment that is decoded */
    Bytes threads; /* int64_t: a native id and the number of its name, in turn */
    int64_t records, torn, orphans, strays;
} Decoder;

#define SLOT(decoder, n) (((Slot *)(decoder)->slots.data) + (n))
#define STACK(decoder, n) (((Stack *)(decoder)->stacks.data) + (n))
#define FLOW(decoder, n) (((Flow *)(decoder)->flows.data) + (n))

static inline uint64_t mixed(uint64_t value) {
    value *= 0x9e3779b97f4a7c15ull;
    return value ^ value >> 32;
}

/* ---------------------------------------------------------------- open spans */

static int32_t new_element(Bytes *array, int32_t *free_list, size_t size, size_t next_at) {
    if (*free_list != NONE) {
        int32_t found = *free_list;
        memcpy(free_list, array->data + (size_t)found * size + next_at, sizeof *free_list);
        return found;
    }
    if (array->size / size >= INT32_MAX || room(array, size)) return NONE;
    array->size += size;
    return (int32_t)(array->size / size - 1);
}

static int rebucket(Decoder *decoder, size_t many) {
    int32_t *buckets = malloc(many * sizeof *buckets);
    if (!buckets) return NO_MEMORY;
    for (size_t n = 0; n < many; n++) buckets[n] = NONE;
    free(decoder->buckets);
    decoder->buckets = buckets;
    decoder->many_buckets = many;
    for (int32_t at = decoder->newest; at != NONE; at = SLOT(decoder, at)->older) { /* the oldest comes first then */
        int32_t *bucket = &buckets[mixed((uint64_t)SLOT(decoder, at)->start_ns) & (many - 1)];
        SLOT(decoder, at)->next = *bucket;
        *bucket = at;
    }
    return SOUND;
}

/* Add a slot for a start; those of one start are in its bucket in the order in which they were added. */
static int32_t open_slot(Decoder *decoder, int64_t start_ns) {
    if (decoder->many_open >= decoder->many_buckets &&
        rebucket(decoder, decoder->many_buckets ? decoder->many_buckets * 2 : 256))
        return NONE;
    int32_t found = new_element(&decoder->slots, &decoder->free_slot, sizeof(Slot), offsetof(Slot, next));
    if (found == NONE) return NONE;
    Slot *slot = SLOT(decoder, found);
    memset(slot, 0, sizeof *slot);
    slot->start_ns = start_ns;
    slot->began = slot->place = decoder->began++;
    slot->next = slot->stack = slot->below = slot->above = slot->newer = slot->first_flow = slot->last_flow = NONE;
    int32_t *link = &decoder->buckets[mixed((uint64_t)start_ns) & (decoder->many_buckets - 1)];
    int is_first = 1;
    for (; *link != NONE; link = &SLOT(decoder, *link)->next) {
        decoder->work++;
        if (is_first && SLOT(decoder, *link)->start_ns == start_ns) {
            slot->place = SLOT(decoder, *link)->place;
            is_first = 0;
        }
    }
    *link = found;
    slot->older = decoder->newest;
    if (decoder->newest != NONE) SLOT(decoder, decoder->newest)->newer = found;
    else decoder->oldest = found;
    decoder->newest = found;
    decoder->many_open++;
    return found;
}

static void close_slot(Decoder *decoder, int32_t at) {
    Slot *slot = SLOT(decoder, at);
    int32_t *link = &decoder->buckets[mixed((uint64_t)slot->start_ns) & (decoder->many_buckets - 1)];
    while (*link != at) link = &SLOT(decoder, *link)->next;
    *link = slot->next;
    if (slot->older != NONE) SLOT(decoder, slot->older)->newer = slot->newer;
    else decoder->oldest = slot->newer;
    if (slot->newer != NONE) SLOT(decoder, slot->newer)->older = slot->older;
    else decoder->newest = slot->older;
    free(slot->copy);
    slot->copy = NULL;
    slot->next = decoder->free_slot;
    decoder->free_slot = at;
    decoder->many_open--;
}

/* The open span that an end belongs to: of several with its start that of its own thread, else the last one. An end
   that came early is returned as well. */
static int32_t slot_of(Decoder *decoder, int64_t start_ns) {
    if (!decoder->many_buckets) return NONE;
    int32_t last = NONE, own = NONE, many = 0;
    int32_t at = decoder->buckets[mixed((uint64_t)start_ns) & (decoder->many_buckets - 1)];
    for (; at != NONE; at = SLOT(decoder, at)->next) {
        Slot *slot = SLOT(decoder, at);
        decoder->work++;
        if (slot->start_ns != start_ns) continue;
        last = at;
        many++;
        if (own == NONE && slot->thread == decoder->thread) own = at;
    }
    return many > 1 && own != NONE ? own : last;
}

/* ---------------------------------------------------------------- stacks of a thread and task */

static int rebucket_stacks(Decoder *decoder, size_t many) {
    int32_t *buckets = malloc(many * sizeof *buckets);
    if (!buckets) return NO_MEMORY;
    for (size_t n = 0; n < many; n++) buckets[n] = NONE;
    for (size_t old = 0; old < decoder->many_stack_buckets; old++) {
        int32_t at = decoder->stack_buckets[old];
        while (at != NONE) {
            Stack *stack = STACK(decoder, at);
            int32_t next = stack->next;
            int32_t *bucket = &buckets[mixed(mixed((uint64_t)stack->thread) ^ (uint64_t)stack->task) & (many - 1)];
            stack->next = *bucket;
            *bucket = at;
            at = next;
        }
    }
    free(decoder->stack_buckets);
    decoder->stack_buckets = buckets;
    decoder->many_stack_buckets = many;
    return SOUND;
}

static inline int32_t *stack_bucket(Decoder *decoder, int64_t thread, int64_t task) {
    uint64_t hash = mixed(mixed((uint64_t)thread) ^ (uint64_t)task);
    return &decoder->stack_buckets[hash & (decoder->many_stack_buckets - 1)];
}

static int32_t stack_of(Decoder *decoder, int64_t thread, int64_t task) {
    if (!decoder->many_stack_buckets) return NONE;
    int32_t at = *stack_bucket(decoder, thread, task);
    while (at != NONE && (STACK(decoder, at)->thread != thread || STACK(decoder, at)->task != task))
        at = STACK(decoder, at)->next;
    return at;
}

static int push(Decoder *decoder, int32_t at) {
    Slot *slot = SLOT(decoder, at);
    int32_t found = stack_of(decoder, slot->thread, slot->task);
    if (found == NONE) {
        if (decoder->many_stacks >= decoder->many_stack_buckets &&
            rebucket_stacks(decoder, decoder->many_stack_buckets ? decoder->many_stack_buckets * 2 : 64))
            return NO_MEMORY;
        found = new_element(&decoder->stacks, &decoder->free_stack, sizeof(Stack), offsetof(Stack, next));
        if (found == NONE) return NO_MEMORY;
        Stack *stack = STACK(decoder, found);
        int32_t *bucket = stack_bucket(decoder, slot->thread, slot->task);
        stack->thread = slot->thread;
        stack->task = slot->task;
        stack->top = NONE;
        stack->next = *bucket;
        *bucket = found;
        decoder->many_stacks++;
    }
    Stack *stack = STACK(decoder, found);
    slot->stack = found;
    slot->below = stack->top;
    slot->above = NONE;
    if (stack->top != NONE) SLOT(decoder, stack->top)->above = at;
    stack->top = at;
    return SOUND;
}

static inline int32_t lane_of(const Slot *slot) {
    int32_t lane = 0;
    for (uint64_t barred = slot->barred; barred & 1; barred >>= 1) lane++;
    return lane;
}

/* Take a span off its stack: those that began after it and go on overlap it without nesting, so that none of them can
   be on its lane. */
static int leave(Decoder *decoder, int32_t at) {
    Slot *slot = SLOT(decoder, at);
    Stack *stack = STACK(decoder, slot->stack);
    if (slot->above != NONE) {
        int32_t lane = lane_of(slot);
        if (lane >= MOST_LANES) return UNSOUND;
        for (int32_t young = slot->above; young != NONE; young = SLOT(decoder, young)->above) {
            SLOT(decoder, young)->barred |= (uint64_t)1 << lane;
            decoder->work++;
        }
        SLOT(decoder, slot->above)->below = slot->below;
    } else
        stack->top = slot->below;
    if (slot->below != NONE) SLOT(decoder, slot->below)->above = slot->above;
    if (stack->top == NONE) {
        int32_t *link = stack_bucket(decoder, stack->thread, stack->task);
        while (*link != slot->stack) link = &STACK(decoder, *link)->next;
        *link = stack->next;
        stack->next = decoder->free_stack;
        decoder->free_stack = slot->stack;
        decoder->many_stacks--;
    }
    return SOUND;
}

/* ---------------------------------------------------------------- rows */

static const uint8_t WIDTHS[] = {8, 8, 4, 4, 1, 1};

/* The cell of a column in the row that is being made. */
#define CELL(column, type) (((type *)(column).data)[decoder->rows])

/* Fill the cells of an argument's column, from one row to another, as if no span had it. */
static void clear_cells(Bytes *column, int32_t kind, size_t first, size_t behind) {
    switch (kind) {
    case WHOLE_NUMBER:
        for (size_t row = first; row < behind; row++) ((int64_t *)column->data)[row] = MISSING;
        break;
    case DECIMAL:
        for (size_t row = first; row < behind; row++) ((double *)column->data)[row] = NAN;
        break;
    case ONLY_TEXT:
    case AS_TEXT:
        for (size_t row = first; row < behind; row++) ((int32_t *)column->data)[row] = NONE;
        break;
    default:
        memset(column->data + first, 0, behind - first);
    }
}

static int resize(Bytes *column, size_t bytes) {
    column->size = 0;
    uint8_t *data = realloc(column->data, bytes);
    if (!data) return NO_MEMORY;
    column->data = data;
    column->capacity = bytes;
    return SOUND;
}

/* Make the column of an argument that no row had so far; what nobody has gets none. */
static int begin_column(Decoder *decoder, int32_t argument) {
    Bytes *column = &decoder->columns.arguments[argument];
    int32_t kind = decoder->arguments[argument].kind;
    if (resize(column, (size_t)decoder->row_room * WIDTHS[kind])) return NO_MEMORY;
    clear_cells(column, kind, 0, (size_t)decoder->row_room);
    return SOUND;
}

static inline int32_t argument_of(const Decoder *decoder, const Value *key) {
    if (key->length > LONGEST_KEY) return NONE;
    int32_t at = decoder->of_length[key->length];
    while (at != NONE && !is_same(decoder->arguments[at].key, key->text, key->length)) at = decoder->arguments[at].next;
    return at;
}

/* Add a number of the row that is being made, by its name if it has one. One that may not be right makes the row odd. */
static int put_number(Decoder *decoder, int32_t argument, int32_t name, const Value *value) {
    Columns *to = &decoder->columns;
    const Argument *of = &decoder->arguments[argument];
    if (value->kind != INTEGER || value->integer < of->least || value->integer > of->most) {
        CELL(to->flags, uint8_t) |= ODD;
        return SOUND;
    }
    if (room(&to->number_row, 8) || room(&to->number_of, 1) || room(&to->number_name, 4) || room(&to->number_value, 8))
        return NO_MEMORY;
    PUT(to->number_row, int64_t, decoder->rows);
    PUT(to->number_of, uint8_t, argument);
    PUT(to->number_name, int32_t, name);
    PUT(to->number_value, double, value->integer);
    return SOUND;
}

/* Add the numbers of a map that was checked; a name that comes twice makes the row odd. */
static int put_numbers(Decoder *decoder, int32_t argument, const uint8_t *at, const uint8_t *end) {
    uint64_t many;
    Value key, value;
    at = step_into(at, &many);
    decoder->maps++;
    while (many--) {
        if (!(at = read_value(at, end, &key, 1)) || !(at = read_value(at, end, &value, 1))) return UNSOUND;
        int32_t name = intern(&decoder->texts, key.text, key.length);
        if (name == NONE) return NO_MEMORY;
        while (decoder->name_maps.size / 8 <= (size_t)name) {
            if (room(&decoder->name_maps, 8)) return NO_MEMORY;
            PUT(decoder->name_maps, uint64_t, 0);
        }
        uint64_t *last = (uint64_t *)decoder->name_maps.data + name;
        if (*last == decoder->maps) CELL(decoder->columns.flags, uint8_t) |= ODD;
        *last = decoder->maps;
        if (put_number(decoder, argument, name, &value)) return NO_MEMORY;
    }
    return SOUND;
}

/* Add what an argument of the last two kinds has; one that comes twice makes the row odd. */
static int set_numbers(Decoder *decoder, int32_t argument, const Value *value, const uint8_t *end) {
    Argument *of = &decoder->arguments[argument];
    if (of->row == decoder->all_rows || (of->kind == NUMBERS && value->kind != MAP)) {
        CELL(decoder->columns.flags, uint8_t) |= ODD;
        return SOUND;
    }
    of->row = decoder->all_rows;
    return of->kind == NUMBERS ? put_numbers(decoder, argument, value->begin, end)
                               : put_number(decoder, argument, NONE, value);
}

/* Note the value of an argument that ends there. */
static int set_cell(Decoder *decoder, int32_t argument, const Value *value, const uint8_t *end) {
    const Argument *of = &decoder->arguments[argument];
    Bytes *column = &decoder->columns.arguments[argument];
    int is_odd = 0;
    if (of->kind >= RARE_NUMBER) return set_numbers(decoder, argument, value, end);
    if (!column->data && begin_column(decoder, argument)) return NO_MEMORY;
    switch (of->kind) {
    case WHOLE_NUMBER:
        is_odd = value->kind != INTEGER || CELL(*column, int64_t) != MISSING || value->integer < of->least ||
                 value->integer > of->most;
        if (value->kind == INTEGER) CELL(*column, int64_t) = value->integer;
        break;
    case DECIMAL: {
        double number = value->kind == NUMBER ? value->number : (double)value->integer;
        is_odd = (value->kind != INTEGER && value->kind != NUMBER) || !isnan(CELL(*column, double)) ||
                 !(number >= (double)of->least && number <= (double)of->most); /* so if it is none */
        CELL(*column, double) = number;
        break;
    }
    case ONLY_TEXT:
    case AS_TEXT:
        CELL(*column, int32_t) = NONE;
        if (value->kind == TEXT) {
            int32_t text = intern(&decoder->texts, value->text, value->length);
            if (text == NONE) return NO_MEMORY;
            CELL(*column, int32_t) = text;
        } else
            is_odd = value->kind != NIL && of->kind == AS_TEXT;
        break;
    case IS_TRUE:
        CELL(*column, uint8_t) = value->kind == TRUTH && value->integer;
        break;
    case IS_TRUTHY:
        CELL(*column, uint8_t) = value->kind == INTEGER || value->kind == TRUTH ? value->integer != 0
                                 : value->kind == NUMBER                        ? value->number != 0
                                 : value->kind == TEXT                          ? value->length != 0
                                 : value->kind == BIG                           ? 1
                                 : value->kind == NIL                           ? 0
                                                                                : !value->is_empty;
        break;
    }
    if (is_odd) CELL(decoder->columns.flags, uint8_t) |= ODD;
    return SOUND;
}

/* Pick the arguments that have columns out of a map that was checked. */
static int pick(Decoder *decoder, const uint8_t *at, const uint8_t *end) {
    uint64_t many;
    Value key, value;
    at = step_into(at, &many);
    while (many--) {
        if (!(at = read_value(at, end, &key, 1)) || !(at = read_value(at, end, &value, 1))) return UNSOUND;
        int32_t argument = argument_of(decoder, &key);
        int state = argument == NONE ? SOUND : set_cell(decoder, argument, &value, at);
        if (state) return state;
    }
    return SOUND;
}

/* Pick them out of what a typed span was begun with: an array of its values, and last a map or nil. */
static int pick_typed(Decoder *decoder, const Type *type, const uint8_t *at, const uint8_t *end) {
    uint64_t many;
    Value value;
    at = step_into(at, &many);
    for (uint64_t n = 0; n + 1 < many; n++) {
        if (!(at = read_value(at, end, &value, 1))) return UNSOUND;
        int32_t argument = n < (uint64_t)type->fields ? type->arguments[n] : NONE;
        int state = argument == NONE ? SOUND : set_cell(decoder, argument, &value, at);
        if (state) return state;
    }
    return *at == 0xc0 ? SOUND : pick(decoder, at, end);
}

/* Make room for more rows. The columns of spans have as many rows as there is room for; `rltrace_take` cuts them. */
static int grow_rows(Decoder *decoder) {
    Columns *to = &decoder->columns;
    Bytes *wide[] = {&to->thread, &to->task, &to->start_ns, &to->end_ns, &to->args_at};
    Bytes *half[] = {&to->name, &to->lane, &to->type, &to->begin_bytes, &to->late_bytes};
    size_t rows = (size_t)decoder->rows, capacity = rows ? rows * 2 : decoder->last_rows ? decoder->last_rows : 1024;
    while (capacity < rows + decoder->likely_rows) capacity *= 2;
    for (int n = 0; n < 5; n++)
        if (resize(wide[n], capacity * 8) || resize(half[n], capacity * 4)) return NO_MEMORY;
    if (resize(&to->flags, capacity)) return NO_MEMORY;
    for (int32_t n = 0; n < decoder->many_arguments; n++) {
        int32_t kind = decoder->arguments[n].kind;
        if (!to->arguments[n].data) continue;
        if (resize(&to->arguments[n], capacity * WIDTHS[kind])) return NO_MEMORY;
        clear_cells(&to->arguments[n], kind, rows, capacity);
    }
    decoder->row_room = (int64_t)capacity;
    return SOUND;
}

/* Add the arrows of a span to the row that is being added; give their places back if the span is over. */
static int put_flows(Decoder *decoder, const Slot *slot, int is_over) {
    Columns *to = &decoder->columns;
    for (int32_t at = slot->first_flow; at != NONE;) {
        Flow *flow = FLOW(decoder, at);
        int32_t next = flow->next;
        if (room(&to->flow_row, 8) || room(&to->flow_key, 4) || room(&to->flow_is_out, 1)) return NO_MEMORY;
        PUT(to->flow_row, int64_t, decoder->rows);
        PUT(to->flow_key, int32_t, flow->key);
        PUT(to->flow_is_out, uint8_t, flow->is_out);
        if (is_over) {
            flow->next = decoder->free_flow;
            decoder->free_flow = at;
        }
        at = next;
    }
    return SOUND;
}

/* Add the row of a span. Its encoded arguments are those of its beginning and the late ones. */
static int put_row(Decoder *decoder, const Slot *slot, int64_t end_ns, int32_t lane, const uint8_t *late,
                   uint32_t late_bytes, int flags) {
    Columns *to = &decoder->columns;
    if (decoder->rows == decoder->row_room && grow_rows(decoder)) return NO_MEMORY;
    CELL(to->name, int32_t) = slot->name;
    CELL(to->thread, int64_t) = slot->thread;
    CELL(to->task, int64_t) = slot->task;
    CELL(to->lane, int32_t) = lane;
    CELL(to->start_ns, int64_t) = slot->start_ns;
    CELL(to->end_ns, int64_t) = end_ns;
    CELL(to->flags, uint8_t) = (uint8_t)(slot->is_automatic ? flags | AUTOMATIC : flags);
    CELL(to->type, int32_t) = slot->type;
    CELL(to->args_at, int64_t) = (int64_t)to->blobs.size;
    CELL(to->begin_bytes, int32_t) = (int32_t)slot->args_bytes;
    CELL(to->late_bytes, int32_t) = (int32_t)late_bytes;
    decoder->all_rows++;
    if (slot->args_bytes) {
        const uint8_t *end = slot->args + slot->args_bytes;
        int state = slot->type == NONE
                        ? pick(decoder, slot->args, end)
                        : pick_typed(decoder, (Type *)decoder->types.data + slot->type, slot->args, end);
        if (state || append(&to->blobs, slot->args, slot->args_bytes)) return state ? state : NO_MEMORY;
    }
    if (late_bytes) {
        int state = pick(decoder, late, late + late_bytes);
        if (state || append(&to->blobs, late, late_bytes)) return state ? state : NO_MEMORY;
    }
    if (put_flows(decoder, slot, !(flags & GOES_ON))) return NO_MEMORY;
    decoder->rows++;
    return SOUND;
}

static void set_args(Slot *slot, const Value *args, const uint8_t *behind) {
    int is_there = args->kind == MAP && !args->is_empty;
    slot->args = is_there ? args->begin : NULL;
    slot->args_bytes = is_there ? (uint32_t)(behind - args->begin) : 0;
}

/* Give a slot its own copy of encoded arguments. */
static int keep_args(Slot *slot, const uint8_t *args, uint32_t bytes) {
    uint8_t *copy = NULL;
    if (bytes) {
        if (!(copy = malloc(bytes))) return NO_MEMORY;
        memcpy(copy, args, bytes);
    }
    free(slot->copy);
    slot->args = slot->copy = copy;
    slot->args_bytes = bytes;
    return SOUND;
}

/* ---------------------------------------------------------------- records */

static int begin_span(Decoder *decoder, Slot *begun) {
    if (begun->start_ns < decoder->first_ns || begun->start_ns > decoder->last_ns) {
        decoder->torn++;
        free(begun->copy);
        return SOUND;
    }
    int32_t early = decoder->many_early ? slot_of(decoder, begun->start_ns) : NONE;
    if (early != NONE && SLOT(decoder, early)->is_early) {
        Slot *end = SLOT(decoder, early);
        begun->first_flow = NONE;
        int state = put_row(decoder, begun, end->end_ns, NONE, end->args, end->args_bytes, 0);
        free(begun->copy);
        close_slot(decoder, early);
        decoder->many_early--;
        return state;
    }
    int32_t at = open_slot(decoder, begun->start_ns);
    if (at == NONE) {
        free(begun->copy);
        return NO_MEMORY;
    }
    Slot *slot = SLOT(decoder, at);
    slot->thread = begun->thread;
    slot->task = begun->task;
    slot->name = begun->name;
    slot->type = begun->type;
    slot->is_automatic = begun->is_automatic;
    slot->args = begun->args;
    slot->args_bytes = begun->args_bytes;
    slot->copy = begun->copy;
    return push(decoder, at);
}

static int end_span(Decoder *decoder, const Value *values, const uint8_t *behind_args) {
    int64_t start_ns = values[0].integer, end_ns = values[1].integer;
    if (start_ns < 0 || start_ns > end_ns || end_ns > decoder->last_ns) {
        decoder->torn++;
        return SOUND;
    }
    Slot late;
    set_args(&late, &values[2], behind_args);
    int32_t at = slot_of(decoder, start_ns);
    if (at == NONE) {
        at = open_slot(decoder, start_ns);
        if (at == NONE) return NO_MEMORY;
        SLOT(decoder, at)->is_early = 1;
        decoder->many_early++;
    }
    Slot *slot = SLOT(decoder, at);
    if (slot->is_early) {
        slot->end_ns = end_ns;
        return keep_args(slot, late.args, late.args_bytes);
    }
    int state = leave(decoder, at);
    /* What another thread has ended overlaps anything: these records are not in the order of their times. */
    int32_t lane = slot->thread == decoder->thread ? lane_of(slot) : NONE;
    if (!state) state = put_row(decoder, slot, end_ns, lane, late.args, late.args_bytes, 0);
    close_slot(decoder, at);
    return state;
}

static int finished_span(Decoder *decoder, const Value *values, const uint8_t *behind_args, int is_automatic) {
    Slot slot = {0};
    slot.start_ns = values[2].integer;
    int64_t end_ns = values[3].integer;
    if (slot.start_ns < 0 || slot.start_ns > end_ns || end_ns > decoder->last_ns) {
        decoder->torn++;
        return SOUND;
    }
    slot.name = intern(&decoder->texts, values[0].text, values[0].length);
    if (slot.name == NONE) return NO_MEMORY;
    slot.thread = decoder->thread;
    slot.task = values[1].integer;
    slot.type = slot.first_flow = NONE;
    slot.is_automatic = (uint8_t)is_automatic;
    set_args(&slot, &values[4], behind_args);
    return put_row(decoder, &slot, end_ns, NONE, NULL, 0, FINISHED);
}

static int named_span(Decoder *decoder, const Value *values, const uint8_t *behind_args, int is_automatic) {
    Slot slot = {0};
    slot.start_ns = values[2].integer;
    slot.name = intern(&decoder->texts, values[0].text, values[0].length);
    if (slot.name == NONE) return NO_MEMORY;
    slot.thread = decoder->thread;
    slot.task = values[1].integer;
    slot.type = NONE;
    slot.is_automatic = (uint8_t)is_automatic;
    set_args(&slot, &values[3], behind_args);
    return begin_span(decoder, &slot);
}

/* Keep what a typed span was begun with as an array of its values, and last its map or nil. */
static int typed_span(Decoder *decoder, const Value *values, uint32_t many, const uint8_t *behind_args) {
    const Type *types = (const Type *)decoder->types.data;
    int32_t known = (int32_t)(decoder->types.size / sizeof(Type)), at = 0;
    while (at < known && types[at].number != values[0].integer) at++;
    if (at == known) return UNSOUND;
    uint32_t of_values = many - 5;
    size_t value_bytes = (size_t)(values[many - 4].begin - values[1].begin);
    size_t args_bytes = (size_t)(behind_args - values[many - 2].begin);
    Slot slot = {0};
    if (of_values || values[many - 2].kind == MAP) {
        slot.args_bytes = (uint32_t)(3 + value_bytes + args_bytes);
        slot.args = slot.copy = malloc(slot.args_bytes);
        if (!slot.copy) return NO_MEMORY;
        slot.copy[0] = 0xdc;
        slot.copy[1] = 0;
        slot.copy[2] = (uint8_t)(of_values + 1);
        memcpy(slot.copy + 3, values[1].begin, value_bytes);
        memcpy(slot.copy + 3 + value_bytes, values[many - 2].begin, args_bytes);
    }
    slot.start_ns = values[many - 3].integer;
    slot.task = values[many - 4].integer;
    slot.thread = decoder->thread;
    slot.name = types[at].name;
    slot.type = at;
    slot.is_automatic = types[at].is_automatic;
    return begin_span(decoder, &slot);
}

static int sample(Decoder *decoder, const Value *values) {
    Columns *to = &decoder->columns;
    const Value *value = &values[2];
    if (values[1].integer < 0 || values[1].integer > decoder->last_ns) {
        decoder->torn++;
        return SOUND;
    }
    int32_t name = intern(&decoder->texts, values[0].text, values[0].length);
    if (name == NONE || room(&to->sample_name, 4) || room(&to->sample_thread, 8) || room(&to->sample_ns, 8) ||
        room(&to->sample_value, 8) || room(&to->sample_flags, 1))
        return NO_MEMORY;
    int is_whole = value->kind != NUMBER;
    double number = value->kind == NUMBER || value->kind == BIG ? value->number : (double)value->integer;
    int is_beyond = is_whole ? value->kind == BIG || value->integer > BEYOND || value->integer < -BEYOND
                             : number > (double)BEYOND || number < -(double)BEYOND;
    PUT(to->sample_name, int32_t, name);
    PUT(to->sample_thread, int64_t, decoder->thread);
    PUT(to->sample_ns, int64_t, values[1].integer);
    PUT(to->sample_value, double, number);
    PUT(to->sample_flags, uint8_t, (is_whole ? WHOLE_SAMPLE : 0) | (is_beyond ? BEYOND_BYTES : 0));
    return SOUND;
}

static int flow(Decoder *decoder, const Value *values) {
    const Value *direction = &values[3];
    int is_out = direction->length == 3 && !memcmp(direction->text, "out", 3);
    if (!is_out && (direction->length != 2 || memcmp(direction->text, "in", 2))) return UNSOUND;
    int32_t found = stack_of(decoder, decoder->thread, values[1].integer);
    if (found == NONE) {
        decoder->orphans++;
        decoder->strays++;
        return SOUND;
    }
    int32_t key = put_text(&decoder->keys, values[0].text, values[0].length);
    if (key == NONE) return NO_MEMORY;
    int32_t at = new_element(&decoder->flows, &decoder->free_flow, sizeof(Flow), offsetof(Flow, next));
    if (at == NONE) return NO_MEMORY;
    Flow *made = FLOW(decoder, at);
    made->key = key;
    made->next = NONE;
    made->is_out = (uint8_t)is_out;
    Slot *slot = SLOT(decoder, STACK(decoder, found)->top);
    if (slot->last_flow != NONE) FLOW(decoder, slot->last_flow)->next = at;
    else slot->first_flow = at;
    slot->last_flow = at;
    return SOUND;
}

static int thread(Decoder *decoder, const Value *values) {
    int32_t name = intern(&decoder->texts, values[1].text, values[1].length);
    if (name == NONE || room(&decoder->threads, 16)) return NO_MEMORY;
    decoder->thread = values[0].integer;
    PUT(decoder->threads, int64_t, decoder->thread);
    PUT(decoder->threads, int64_t, name);
    return SOUND;
}

static inline int is_args(const Value *value) { return value->kind == MAP || value->kind == NIL; }

/* Take a record by the types of its elements, as `_EventReader` does. `behind` has where each element ends. */
static int take(Decoder *decoder, const Value *values, const uint8_t *const *behind, uint32_t many) {
    int is_automatic = many > 5 && values[0].kind == INTEGER && values[0].integer == 0;
    if (is_automatic) values++, behind++, many--;
    if (values[0].kind == TEXT && values[1].kind == INTEGER) {
        if (many == 5 && values[2].kind == INTEGER && is_args(&values[3]))
            return named_span(decoder, values, behind[3], is_automatic);
        if (many == 6 && values[2].kind == INTEGER && values[3].kind == INTEGER && is_args(&values[4]))
            return finished_span(decoder, values, behind[4], is_automatic);
        if (many == 4 && (values[2].kind == INTEGER || values[2].kind == BIG || values[2].kind == NUMBER ||
                          values[2].kind == TRUTH))
            return sample(decoder, values);
        if (many == 5 && !is_automatic && values[2].kind == INTEGER && values[3].kind == TEXT)
            return flow(decoder, values);
        return UNSOUND;
    }
    if (values[0].kind != INTEGER || is_automatic) return UNSOUND;
    if (many == 4 && values[1].kind == INTEGER && is_args(&values[2])) return end_span(decoder, values, behind[2]);
    if (many == 3 && values[1].kind == TEXT) return thread(decoder, values);
    if (many > 4 && values[0].integer < 0 && values[many - 4].kind == INTEGER && values[many - 3].kind == INTEGER &&
        is_args(&values[many - 2]))
        return typed_span(decoder, values, many, behind[many - 2]);
    return UNSOUND;
}

/* Copy the arguments of what began in this segment and goes on: the segment is gone when it ends. */
static int keep_open(Decoder *decoder) {
    for (int32_t at = decoder->newest; at != NONE; at = SLOT(decoder, at)->older) {
        Slot *slot = SLOT(decoder, at);
        if (slot->began < decoder->began_before) break;
        if (!slot->copy && keep_args(slot, slot->args, slot->args_bytes)) return NO_MEMORY;
    }
    return SOUND;
}

/* Step into the record that begins here: the number of its elements, which stays as it is if none does. */
static inline const uint8_t *into_record(const uint8_t *at, const uint8_t *end, uint32_t *many) {
    if ((*at & 0xf0) == 0x90) *many = *at++ & 15;
    else if (*at == 0xdc && end - at > 2) {
        *many = (uint32_t)big_endian(at + 1, 2);
        at += 3;
    }
    return at;
}

static int decode(Decoder *decoder, const uint8_t *data, size_t size, int may_grow) {
    const uint8_t *at = data, *end = data + size;
    Value values[MOST_ELEMENTS];
    const uint8_t *behind[MOST_ELEMENTS];
    while (at < end && *at) {
        uint32_t many = 0;
        at = into_record(at, end, &many);
        if (many < 3 || many > MOST_ELEMENTS) return UNSOUND;
        for (uint32_t n = 0; n < many; n++) {
            at = read_value(at, end, &values[n], 1);
            if (!at) return UNSOUND;
            behind[n] = at;
        }
        if (values[many - 1].kind != TRUTH || !values[many - 1].integer) return UNSOUND;
        decoder->records++;
        int state = take(decoder, values, behind, many);
        if (state) return state;
        if (decoder->work > 64 * ((uint64_t)decoder->records + 1024)) return UNSOUND; /* made to take long */
    }
    if (may_grow) return SOUND;
    while (at < end)
        if (*at++) return UNSOUND;
    return SOUND;
}

/* ---------------------------------------------------------------- what Python calls */

/* Which source this was built from: its CRC-32, as Python computes it. */
PUBLIC uint32_t rltrace_source(void) { return SOURCE; }

/* Make a decoder that gives these arguments columns of their own. */
PUBLIC Decoder *rltrace_new(int32_t many, const char *const *keys, const int32_t *kinds, const int64_t *least,
                            const int64_t *most) {
    Decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder || many > MOST_ARGUMENTS) {
        free(decoder);
        return NULL;
    }
    decoder->free_slot = decoder->free_stack = decoder->free_flow = decoder->oldest = decoder->newest = NONE;
    for (int32_t n = 0; n <= LONGEST_KEY; n++) decoder->of_length[n] = NONE;
    for (int32_t n = 0; n < many; n++) {
        size_t length = strlen(keys[n]);
        if (length > LONGEST_KEY || kinds[n] < WHOLE_NUMBER || kinds[n] > NUMBERS) {
            free(decoder);
            return NULL;
        }
        Argument *argument = &decoder->arguments[n];
        memcpy(argument->key, keys[n], length);
        argument->length = (uint32_t)length;
        argument->kind = kinds[n];
        argument->least = least[n];
        argument->most = most[n];
        argument->next = decoder->of_length[length];
        decoder->of_length[length] = n;
    }
    decoder->many_arguments = many;
    return decoder;
}

static void free_columns(Decoder *decoder) {
    Bytes *columns = (Bytes *)&decoder->columns;
    for (size_t n = 0; n < sizeof(Columns) / sizeof(Bytes); n++) free(columns[n].data);
}

PUBLIC void rltrace_delete(Decoder *decoder) {
    if (!decoder) return;
    for (int32_t at = decoder->newest; at != NONE; at = SLOT(decoder, at)->older) free(SLOT(decoder, at)->copy);
    for (size_t n = 0; n < decoder->types.size / sizeof(Type); n++) free(((Type *)decoder->types.data)[n].arguments);
    free_columns(decoder);
    free(decoder->types.data);
    free(decoder->slots.data);
    free(decoder->stacks.data);
    free(decoder->flows.data);
    free(decoder->threads.data);
    free(decoder->name_maps.data);
    free(decoder->buckets);
    free(decoder->stack_buckets);
    free_texts(&decoder->texts);
    free_texts(&decoder->keys);
    free(decoder);
}

/* Declare a typed span; `arguments` has for each of its fields which argument that is, or -1. */
PUBLIC int rltrace_declare(Decoder *decoder, int64_t number, const uint8_t *name, uint32_t length, int is_automatic,
                           int32_t fields, const int32_t *arguments) {
    Type type = {number, intern(&decoder->texts, name, length), (uint8_t)is_automatic, fields, NULL};
    if (type.name == NONE || fields < 0 || !(type.arguments = malloc(((size_t)fields + 1) * sizeof(int32_t))))
        return NO_MEMORY;
    if (fields) memcpy(type.arguments, arguments, (size_t)fields * sizeof(int32_t));
    if (append(&decoder->types, &type, sizeof type)) {
        free(type.arguments);
        return NO_MEMORY;
    }
    return SOUND;
}

/* How many bytes the records at the beginning take that are whole: the next one may be being written. */
PUBLIC uint64_t rltrace_whole_bytes(const uint8_t *data, uint64_t size) {
    const uint8_t *at = data, *end = data + size, *whole = data;
    while (at < end) {
        uint32_t many = 0;
        Value value = {0};
        at = into_record(at, end, &many);
        for (uint32_t n = 0; at && n < many; n++) at = read_value(at, end, &value, 1);
        if (!at || many < 3 || value.kind != TRUTH || !value.integer) break;
        whole = at;
    }
    return (uint64_t)(whole - data);
}

/* Decode a part of a segment, whole records, the first of which are of this thread. */
static int decode_part(Decoder *decoder, const uint8_t *data, uint64_t size, int64_t first_ns, int64_t last_ns,
                            int may_grow, int64_t thread) {
    if (size > INT32_MAX) return UNSOUND;
    decoder->thread = thread;
    decoder->began_before = decoder->began;
    decoder->first_ns = first_ns;
    decoder->last_ns = last_ns;
    decoder->likely_rows = (size_t)size / BYTES_OF_ROW < MOST_LIKELY ? (size_t)size / BYTES_OF_ROW : MOST_LIKELY;
    int state = decode(decoder, data, (size_t)size, may_grow);
    return state ? state : keep_open(decoder);
}

/* Decode the next segment. Times of its records lie between `first_ns` and `last_ns`. After anything but 0 the decoder
   is good for nothing but `rltrace_delete`. */
PUBLIC int rltrace_decode(Decoder *decoder, const uint8_t *data, uint64_t size, int64_t first_ns, int64_t last_ns,
                          int may_grow) {
    return decode_part(decoder, data, size, first_ns, last_ns, may_grow, 0);
}

/* Decode more of a segment, likewise, whose records so far were of this thread; then it is that of the last one. */
PUBLIC int rltrace_decode_more(Decoder *decoder, const uint8_t *data, uint64_t size, int64_t first_ns, int64_t last_ns,
                               int64_t *thread) {
    int state = decode_part(decoder, data, size, first_ns, last_ns, 0, *thread);
    *thread = decoder->thread;
    return state;
}

static int by_place(const void *left, const void *right) {
    const Slot *one = *(const Slot *const *)left, *other = *(const Slot *const *)right;
    if (one->place != other->place) return one->place < other->place ? -1 : 1;
    return one->began < other->began ? -1 : 1;
}

/* Add rows for the spans that are open. */
static int put_open(Decoder *decoder, int flags) {
    const Slot **open = malloc((decoder->many_open + 1) * sizeof *open);
    if (!open) return NO_MEMORY;
    size_t many = 0;
    for (int32_t at = decoder->oldest; at != NONE; at = SLOT(decoder, at)->newer)
        if (!SLOT(decoder, at)->is_early) open[many++] = SLOT(decoder, at);
    qsort(open, many, sizeof *open, by_place);
    int state = SOUND;
    for (size_t n = 0; n < many && !state; n++)
        state = put_row(decoder, open[n], OPEN, lane_of(open[n]), NULL, 0, flags);
    free(open);
    return state;
}

/* Add rows for the spans that never ended, and count the ends that lost their beginning. */
PUBLIC int rltrace_finish(Decoder *decoder) {
    decoder->orphans += (int64_t)decoder->many_early;
    return put_open(decoder, 0);
}

/* Add rows for the spans that are open now, which will have rows again. */
PUBLIC int rltrace_show_open(Decoder *decoder) { return put_open(decoder, GOES_ON); }

/* How many ends wait for a beginning that was not read yet. */
PUBLIC int64_t rltrace_early(const Decoder *decoder) { return (int64_t)decoder->many_early; }

PUBLIC int64_t rltrace_rows(const Decoder *decoder) {
    return decoder->rows + (int64_t)(decoder->columns.sample_ns.size / 8);
}

/* How many columns `rltrace_take` gives. */
PUBLIC int32_t rltrace_columns(void) { return (int32_t)(sizeof(Columns) / sizeof(Bytes)); }

/* Hand over the columns as they are: their addresses and sizes in bytes. Each is freed by `rltrace_free`. */
PUBLIC void rltrace_take(Decoder *decoder, void **data, uint64_t *sizes) {
    Bytes *columns = (Bytes *)&decoder->columns;
    size_t of_spans = offsetof(Columns, blobs) / sizeof(Bytes);
    for (size_t n = 0; n < sizeof(Columns) / sizeof(Bytes); n++) {
        data[n] = columns[n].data;
        sizes[n] = n < of_spans && decoder->row_room
                       ? columns[n].capacity / (size_t)decoder->row_room * (size_t)decoder->rows
                       : columns[n].size;
    }
    for (size_t n = 0; n < sizeof(Columns) / sizeof(Bytes); n++)
        columns[n] = (Bytes){.likely = columns[n].size + columns[n].size / 8};
    decoder->last_rows = (size_t)decoder->rows + (size_t)decoder->rows / 8;
    decoder->rows = decoder->row_room = 0;
}

PUBLIC void rltrace_free(void *data) { free(data); }

/* The texts so far, or the keys of arrows: their letters, and where each of them ends. */
PUBLIC int64_t rltrace_texts(const Decoder *decoder, int are_keys, const uint8_t **letters, const int64_t **ends) {
    const Texts *texts = are_keys ? &decoder->keys : &decoder->texts;
    *letters = texts->letters.data;
    *ends = (const int64_t *)texts->ends.data;
    return (int64_t)texts->many;
}

/* The threads so far, each as its id and the number of its name. */
PUBLIC int64_t rltrace_threads(const Decoder *decoder, const int64_t **pairs) {
    *pairs = (const int64_t *)decoder->threads.data;
    return (int64_t)(decoder->threads.size / 16);
}

/* Damaged records, ends and flows without a beginning, and the flows among them. */
PUBLIC void rltrace_losses(const Decoder *decoder, int64_t *losses) {
    losses[0] = decoder->torn;
    losses[1] = decoder->orphans;
    losses[2] = decoder->strays;
}
