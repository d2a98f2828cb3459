/* Arithmetic of sets of intervals, as `rltrace/analysis/intervals.py` does it with numpy: in one pass instead of ten.

   An interval is two int64_t, `[start, end)`. No number of the caller is used as a place without a check. */

#include <stddef.h>
#include <stdint.h>

#include "public.h"

/* Join intervals that are in the order of their starts, and leave out those that are empty. `joined` has room for
   `many`. Returns how many there are then; -1 if they are not in order. */
PUBLIC int64_t rltrace_union(const int64_t *rows, int64_t many, int64_t *joined) {
    int64_t found = 0, last = INT64_MIN;
    for (int64_t n = 0; n < many; n++) {
        int64_t start = rows[2 * n], end = rows[2 * n + 1];
        if (end <= start) continue;
        if (start < last) return -1;
        last = start;
        if (found && start <= joined[2 * found - 1]) {
            if (end > joined[2 * found - 1]) joined[2 * found - 1] = end;
        } else {
            joined[2 * found] = start;
            joined[2 * found + 1] = end;
            found++;
        }
    }
    return found;
}

/* How many of some windows end at `at` or before (`side` 1), or start before it (`side` 0), near a guess. */
static inline int64_t windows_before(const int64_t *windows, int64_t many, int64_t at, int side, int64_t guess) {
#define IS_BEFORE(n) (side ? windows[2 * (n) + 1] <= at : windows[2 * (n)] < at)
    int64_t low = 0, high = many;
    if (guess < many && IS_BEFORE(guess)) {
        low = guess + 1;
        for (int64_t step = 1; low < many; step *= 2) { /* the next ones first */
            int64_t probe = low + step - 1 < many ? low + step - 1 : many - 1;
            if (!IS_BEFORE(probe)) {
                high = probe;
                break;
            }
            low = probe + 1;
        }
    } else {
        high = guess;
        if (high && IS_BEFORE(high - 1)) return high;
    }
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (IS_BEFORE(middle)) low = middle + 1;
        else high = middle;
    }
    return low;
#undef IS_BEFORE
}

/* Cut intervals at the edges of windows, which are disjoint and in order. Each piece has the place of its window and of
   its row. There is room for `room` pieces; returns how many there are. */
PUBLIC int64_t rltrace_cut(const int64_t *rows, int64_t many, const int64_t *windows, int64_t many_windows,
                           int64_t *pieces, int64_t *window_of, int64_t *row_of, int64_t room) {
    int64_t found = 0, first = 0, behind = 0;
    for (int64_t n = 0; n < many; n++) {
        int64_t start = rows[2 * n], end = rows[2 * n + 1];
        first = windows_before(windows, many_windows, start, 1, first);
        behind = windows_before(windows, many_windows, end, 0, behind);
        for (int64_t window = first; window < behind; window++, found++) {
            if (found >= room) continue;
            int64_t begins = windows[2 * window], ends = windows[2 * window + 1];
            pieces[2 * found] = start > begins ? start : begins;
            pieces[2 * found + 1] = end < ends ? end : ends;
            window_of[found] = window;
            row_of[found] = n;
        }
    }
    return found;
}

/* Add up how long intervals lie inside of windows, by the group of the interval and the kind of the window; an interval
   of no group counts nowhere. `sums` has `groups` rows of `kinds`, which begin as zeros. */
PUBLIC void rltrace_add_up(const int64_t *rows, const int64_t *group_of, int64_t many, const int64_t *windows,
                           const int64_t *kind_of, int64_t many_windows, int64_t groups, int64_t kinds, int64_t *sums) {
    int64_t first = 0;
    for (int64_t n = 0; n < many; n++) {
        int64_t start = rows[2 * n], end = rows[2 * n + 1];
        if (group_of[n] < 0 || group_of[n] >= groups) continue;
        first = windows_before(windows, many_windows, start, 1, first);
        for (int64_t window = first; window < many_windows && windows[2 * window] < end; window++) {
            int64_t begins = windows[2 * window], ends = windows[2 * window + 1];
            if (kind_of[window] < 0 || kind_of[window] >= kinds) continue;
            int64_t inside = (end < ends ? end : ends) - (start > begins ? start : begins);
            uint64_t *sum = (uint64_t *)&sums[group_of[n] * kinds + kind_of[window]];
            *sum += (uint64_t)inside; /* what is beyond 64 bits is lost, as with numpy */
        }
    }
}
