// Finds keys in open-addressed tables, one after the other, while the memory of those that follow is on its way.
// The arrays, and what is where in them, are shard_node/engine/key_index.py's, whose NumPy code gives the same.
#include <stddef.h>
#include <stdint.h>

enum { AHEAD = 16 };
static const uint32_t EMPTY = UINT32_MAX;

static uint64_t home(int64_t key, uint64_t size) {
    uint64_t mixed = (uint64_t)key;
    mixed ^= mixed >> 32;
    mixed *= 0x9E3779B97F4A7C15u;
    return ((mixed >> 32) * size) >> 32;
}

// Of `segments` tables, the entries [first, first + size) of `keys` and `slots`; sought keys [starts[s], starts[s + 1])
// are of table s. A missing key gets `missing`, -1 for one that has no slot.
void find_keys(const int64_t *keys, const uint32_t *slots, size_t segments, const int64_t *first, const int64_t *size,
               const int64_t *starts, const int64_t *sought, int64_t *found) {
    for (size_t s = 0; s < segments; s++) {
        const int64_t *table_keys = keys + first[s];
        const uint32_t *table_slots = slots + first[s];
        const uint64_t entries = (uint64_t)size[s];
        const int64_t begin = starts[s], end = starts[s + 1];
        uint64_t homes[AHEAD];
        for (int64_t i = begin; i < end + AHEAD; i++) {
            if (i - AHEAD >= begin && i - AHEAD < end) {
                const int64_t key = sought[i - AHEAD];
                uint64_t at = homes[i % AHEAD];
                while (table_slots[at] != EMPTY && table_keys[at] != key) {
                    if (++at == entries) at = 0;
                }
                found[i - AHEAD] = table_slots[at] == EMPTY ? -1 : (int64_t)table_slots[at];
            }
            if (i < end) {
                const uint64_t at = home(sought[i], entries);
                homes[i % AHEAD] = at;
                __builtin_prefetch(table_keys + at);
                __builtin_prefetch(table_slots + at);
            }
        }
    }
}
