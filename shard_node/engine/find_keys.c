// Finds keys in open-addressed tables, one after the other, while the memory of those that follow is on its way.
// The arrays, and what is where in them, are shard_node/engine/key_index.py's, whose NumPy code gives the same.
#include <stddef.h>
#include <stdint.h>

enum { AHEAD = 16 };
static const uint32_t EMPTY = UINT32_MAX;

struct __attribute__((packed)) entry {
    int64_t key;
    uint32_t slot;
};

static uint64_t home(int64_t key, uint64_t size) {
    uint64_t mixed = (uint64_t)key;
    mixed ^= mixed >> 32;
    mixed *= 0x9E3779B97F4A7C15u;
    return ((mixed >> 32) * size) >> 32;
}

// Of `segments` tables, the entries [first, first + size); sought keys [starts[s], starts[s + 1]) are of table s. A key
// that is missing gets -1.
void find_keys(const struct entry *entries, size_t segments, const int64_t *first, const int64_t *size,
               const int64_t *starts, const int64_t *sought, int64_t *found) {
    for (size_t s = 0; s < segments; s++) {
        const struct entry *table = entries + first[s];
        const uint64_t length = (uint64_t)size[s];
        const int64_t begin = starts[s], end = starts[s + 1];
        uint64_t homes[AHEAD];
        for (int64_t i = begin; i < end + AHEAD; i++) {
            if (i - AHEAD >= begin && i - AHEAD < end) {
                const int64_t key = sought[i - AHEAD];
                uint64_t at = homes[i % AHEAD];
                while (table[at].slot != EMPTY && table[at].key != key) {
                    if (++at == length) at = 0;
                }
                found[i - AHEAD] = table[at].slot == EMPTY ? -1 : (int64_t)table[at].slot;
            }
            if (i < end) {
                homes[i % AHEAD] = home(sought[i], length);
                __builtin_prefetch(table + homes[i % AHEAD]);
            }
        }
    }
}
