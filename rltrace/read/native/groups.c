/* Places of equal keys, as `rltrace/analysis/seen/rows.py` finds them with numpy: by counting instead of sorting. */

#include <stddef.h>
#include <stdint.h>

#include "public.h"

/* Order the places of `many` keys by where each key is first, and those of one key as they are. The keys are from 0 to
   `most`; `counts` has `most` + 1 zeros, `ends` as much room, and becomes where each group ends in `order`. Returns how
   many groups there are; -1 if a key is not in that range. */
PUBLIC int64_t rltrace_group(const int32_t *keys, int64_t many, int32_t most, int64_t *counts, int64_t *order,
                             int64_t *ends) {
    int64_t found = 0, end = 0;
    for (int64_t n = 0; n < many; n++) {
        int32_t key = keys[n];
        if (key < 0 || key > most) return -1;
        if (!counts[key]++) ends[found++] = key;
    }
    for (int64_t group = 0; group < found; group++) {
        int64_t *count = &counts[ends[group]], begin = end;
        end += *count;
        *count = begin; /* where its next place goes */
        ends[group] = end;
    }
    for (int64_t n = 0; n < many; n++) order[counts[keys[n]]++] = n;
    return found;
}
