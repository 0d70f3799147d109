// Pools embedding rows that lie on several cards, and writes rows in place.
//
// What the kernels take, and how rows are laid out, is described, field by field, in kernel_params.py.
//
// One thread owns CHUNK_BYTES of the rows of one bag and walks the bag alone, with several rows on their way at a time.
// Nothing is passed between threads, so tests also run the same source on the host, one thread after the other
// (SHARDRANK_ON_HOST). Needs no CUDA header: NVRTC compiles it as it is.
//
// Rows, places and batches are loaded through the read-only path. Nobody writes them while a launch reads them: row
// writes and uploads are other launches, ordered by events.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int MAX_OWNERS = 66;
constexpr u32 THREADS_PER_BLOCK = 256;
constexpr u32 CHUNK_BYTES = 16;
// Of one bag, that a thread has on their way at a time.
constexpr int ROWS_IN_FLIGHT = 4;

constexpr u32 NOT_HERE = 0xFFFFFFFFu;
// In place of a place, behind the end of a bag.
constexpr u32 NO_VALUE = 0xFFFFFFFEu;
constexpr u32 NO_RUN = 0xFFFFFFFFu;
constexpr u64 NO_BUCKET = 1ull << 63;

// The mix of `mixed` buckets (loader/snapshot/buckets.py).
constexpr u32 MIXED_BITS = 12;
constexpr u64 MIX_FACTOR_0 = 0xFF51AFD7ED558CCDull;
constexpr u64 MIX_FACTOR_1 = 0xC4CEB9FE1A85EC53ull;

constexpr u32 MODE_MEAN = 1;
constexpr u32 MODE_NONE = 2;
constexpr u32 ONE = 0x3F800000u;  // the float 1
constexpr u32 OUT_FP32 = 0;

constexpr int OUTSIDE_COUNTER = 0;
constexpr int NOT_HERE_COUNTER = 1;

struct TableParams {
    u64 begin;
    u64 seed;
    u32 num_rows;
    u32 owner_after;
    u32 bucket_after;
    u32 shifts;
};

struct ArenaParams {
    u8* rows[MAX_OWNERS];
    const u32* places;
    const TableParams* tables;
    const u64* starts;
    const u64* buckets;
    u32 num_tables;
    u32 num_cards;
    u32 owner_bits;
    u32 row_stride;
    u32 embedding_dim;
    u32 _pad;
};

struct RunParams {
    u32 table;
    u32 first;
    u32 num;
    u32 mode;
    i64 out_offset;
    i64 out_stride;
};

struct BatchParams {
    const u32* values;
    const float* weights;
    const u32* offsets;
    const RunParams* runs;
    const uint2* blocks;
    void* out;
    u64* counters;
    u32 num_blocks;
    u32 rotation;
    u32 out_dtype;
    u32 lanes_log2;
};

struct WriteParams {
    const u32* numbers;
    const u8* stored;
    u32 num_rows;
    u32 table;
    u32 card;
    u32 writes_host;
};

// ---------------------------------------------------------------------------------------------------------------------
// Numbers. The conversions to and from 16 bits are instructions of the card; tests bring the host's.

#ifndef SHARDRANK_ON_HOST
__device__ __forceinline__ float2 halves_to_floats(u32 pair) {
    float2 values;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(pair));
    return values;
}

__device__ __forceinline__ u32 floats_to_bfloats(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The address, of which the compiler then knows nothing: it is kept whole in registers, and an element's address is one
// instruction, not the sum of all that this one was made of.
__device__ __forceinline__ u64 keep_whole(u64 address) {
    asm volatile("" : "+l"(address));
    return address;
}

template <class T>
__device__ __forceinline__ void store_to(T* address, const T& value) {
    *address = value;
}

// Loads through the read-only path, if `wanted`; otherwise the value is of no use, or `otherwise`. A predicated
// instruction, where an `if` would become a branch in which the thread waits; volatile, so that the loads of several
// rows stay together, ahead of what uses them; and with a value in either case, since a register that is only written
// sometimes is held through the whole loop.
__device__ __forceinline__ uint4 load_if(bool wanted, const uint4* address) {
    uint4 v;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %4, 0; "
                 "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0; "
                 "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%5];}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "r"(static_cast<u32>(wanted)), "l"(address));
    return v;
}

__device__ __forceinline__ uint2 load_if(bool wanted, const uint2* address) {
    uint2 v;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; mov.u32 %1, 0; "
                 "@p ld.global.nc.v2.u32 {%0, %1}, [%3];}"
                 : "=&r"(v.x), "=&r"(v.y)
                 : "r"(static_cast<u32>(wanted)), "l"(address));
    return v;
}

__device__ __forceinline__ u32 load_if(bool wanted, const u32* address, u32 otherwise) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p ld.global.nc.u32 %0, [%2];}"
                 : "+r"(otherwise)
                 : "r"(static_cast<u32>(wanted)), "l"(address));
    return otherwise;
}

__device__ __forceinline__ u64 load_if(bool wanted, const u64* address, u64 otherwise) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p ld.global.nc.u64 %0, [%2];}"
                 : "+l"(otherwise)
                 : "r"(static_cast<u32>(wanted)), "l"(address));
    return otherwise;
}
#endif

// Byte `number` of the word. 0x4B0000nn is the float 8388608 + nn, so that two cheap instructions do what the
// conversion instruction does at a quarter of the rate.
__device__ __forceinline__ float byte_to_float(u32 word, u32 number) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u + number)) - 8388608.0f;
}

__device__ __forceinline__ u32 word_of(const uint4& chunk, int number) {
    return number == 0 ? chunk.x : number == 1 ? chunk.y : number == 2 ? chunk.z : chunk.w;
}

// ---------------------------------------------------------------------------------------------------------------------
// Row formats. ELEMENTS: of one chunk. MIN_BLOCKS: thread blocks that a multiprocessor is to hold at once; as many as
// leave registers for ROWS_IN_FLIGHT rows without spilling. Tail: scale and bias as they lie in the row. `add` adds
// weight * row.

struct Int8Rows {
    static constexpr int ELEMENTS = 16;
    static constexpr int MIN_BLOCKS = 3;
    using Tail = uint2;

    __device__ static __forceinline__ u32 tail_offset(u32 dim) { return (dim + 7u) & ~7u; }

    __device__ static __forceinline__ Tail load_tail(bool wanted, u64 row, u32 offset) {
        return load_if(wanted, reinterpret_cast<const uint2*>(row + offset));
    }

    __device__ static __forceinline__ void add(
        float (&sums)[ELEMENTS], float& biases, const uint4& chunk, const Tail& tail, float weight) {
        const float factor = weight * __uint_as_float(tail.x);
        biases += weight * __uint_as_float(tail.y);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) sums[i] += factor * byte_to_float(word_of(chunk, i / 4), i % 4);
    }
};

struct Int4Rows {
    static constexpr int ELEMENTS = 32;
    static constexpr int MIN_BLOCKS = 2;
    using Tail = u32;

    __device__ static __forceinline__ u32 tail_offset(u32 dim) { return ((dim + 1u) / 2u + 3u) & ~3u; }

    __device__ static __forceinline__ Tail load_tail(bool wanted, u64 row, u32 offset) {
        return load_if(wanted, reinterpret_cast<const u32*>(row + offset), 0);
    }

    __device__ static __forceinline__ void add(
        float (&sums)[ELEMENTS], float& biases, const uint4& chunk, const Tail& tail, float weight) {
        const float2 scale_and_bias = halves_to_floats(tail);
        const float factor = weight * scale_and_bias.x;
        biases += weight * scale_and_bias.y;
#pragma unroll
        for (int i = 0; i < ELEMENTS; i += 8) {
            const u32 word = word_of(chunk, i / 8);
            const u32 even = word & 0x0F0F0F0Fu;
            const u32 odd = (word >> 4) & 0x0F0F0F0Fu;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sums[i + 2 * j] += factor * byte_to_float(even, j);
                sums[i + 2 * j + 1] += factor * byte_to_float(odd, j);
            }
        }
    }
};

struct NoTail {};

struct Fp16Rows {
    static constexpr int ELEMENTS = 8;
    static constexpr int MIN_BLOCKS = 4;
    using Tail = NoTail;

    __device__ static __forceinline__ u32 tail_offset(u32) { return 0; }
    __device__ static __forceinline__ Tail load_tail(bool, u64, u32) { return {}; }

    __device__ static __forceinline__ void add(
        float (&sums)[ELEMENTS], float&, const uint4& chunk, const Tail&, float weight) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; i += 2) {
            const float2 pair = halves_to_floats(word_of(chunk, i / 2));
            sums[i] += weight * pair.x;
            sums[i + 1] += weight * pair.y;
        }
    }
};

struct Fp32Rows {
    static constexpr int ELEMENTS = 4;
    static constexpr int MIN_BLOCKS = 4;
    using Tail = NoTail;

    __device__ static __forceinline__ u32 tail_offset(u32) { return 0; }
    __device__ static __forceinline__ Tail load_tail(bool, u64, u32) { return {}; }

    __device__ static __forceinline__ void add(
        float (&sums)[ELEMENTS], float&, const uint4& chunk, const Tail&, float weight) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) sums[i] += weight * __uint_as_float(word_of(chunk, i));
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Output

__device__ __forceinline__ bool aligned(const void* address, u32 bytes) {
    return (reinterpret_cast<u64>(address) & (bytes - 1u)) == 0;
}

// values[0 .. min(left, N)) to `out`; in vectors where all of them go and the address allows it.
template <int N>
__device__ __forceinline__ void store_floats(float* out, u32 left, const float (&values)[N]) {
    if (left >= N && aligned(out, 16)) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            store_to(reinterpret_cast<float4*>(out + i),
                     make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]));
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (static_cast<u32>(i) < left) store_to(out + i, values[i]);
        }
    }
}

template <int N>
__device__ __forceinline__ void store_bfloats(u16* out, u32 left, const float (&values)[N]) {
    u32 pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = floats_to_bfloats(values[2 * i], values[2 * i + 1]);
    if (left >= N && aligned(out, N >= 8 ? 16 : 8)) {
        if constexpr (N >= 8) {
#pragma unroll
            for (int i = 0; i < N / 2; i += 4) {
                store_to(reinterpret_cast<uint4*>(out + 2 * i),
                         make_uint4(pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3]));
            }
        } else {
            store_to(reinterpret_cast<uint2*>(out), make_uint2(pairs[0], pairs[1]));
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (static_cast<u32>(i) < left) {
                store_to(out + i, static_cast<u16>(i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2]));
            }
        }
    }
}

// The first `left` of the values, at most N, from the output's element `element` on.
template <int N>
__device__ __forceinline__ void store(const BatchParams& batch, i64 element, u32 left, const float (&values)[N]) {
    if (batch.out_dtype == OUT_FP32) {
        store_floats(static_cast<float*>(batch.out) + element, left, values);
    } else {
        store_bfloats(static_cast<u16*>(batch.out) + element, left, values);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Pooling

__device__ __forceinline__ TableParams load_table(const ArenaParams& arena, u32 number) {
    const uint4* words = reinterpret_cast<const uint4*>(arena.tables + number);
    const uint4 a = __ldg(words), b = __ldg(words + 1);
    return {static_cast<u64>(a.y) << 32 | a.x, static_cast<u64>(a.w) << 32 | a.z, b.x, b.y, b.z, b.w};
}

// Which of the arena's `buckets` says where the places of the row's bucket begin.
__device__ __forceinline__ u32 bucket_of(const TableParams& table, u32 row) {
    const u32 slot_shift = table.shifts >> 8 & 0xFFu;
    u32 mixed = row;
    if (slot_shift == MIXED_BITS) {
        u64 mix = (static_cast<u64>(row >> MIXED_BITS) + table.seed) * MIX_FACTOR_0;
        mix = (mix ^ mix >> 32) * MIX_FACTOR_1;
        mixed ^= static_cast<u32>(mix >> (64 - MIXED_BITS));
    }
    const u32 mask = (1u << (table.shifts >> 16)) - 1u;
    return table.bucket_after - 1u + (mixed >> (table.shifts & 0xFFu) & mask);
}

// Where the table begins: address of its first place; of row 0 itself if all rows have one owner, as there are no
// places then.
__device__ __forceinline__ u64 begin_of(const ArenaParams& arena, const TableParams& table) {
    return table.owner_after ? reinterpret_cast<u64>(arena.rows[table.owner_after - 1u]) + table.begin
                             : reinterpret_cast<u64>(arena.places + table.begin);
}

// The places of rows of the table that begins at `begin`; of an only owner, which needs none, the rows' numbers. What
// it was before if there is none to be found, or it is not wanted. In steps, so that a step's loads are on their way
// together.
template <int N>
__device__ __forceinline__ void find_places(
    const ArenaParams& arena, const TableParams& table, u64 begin, const bool (&wanted)[N], const u32 (&rows)[N],
    u32 (&places)[N]) {
    if (table.owner_after) {
#pragma unroll
        for (int i = 0; i < N; ++i) places[i] = wanted[i] ? rows[i] : places[i];
        return;
    }
    const u32* const first = reinterpret_cast<const u32*>(begin);
    if (!table.bucket_after) {
#pragma unroll
        for (int i = 0; i < N; ++i) places[i] = load_if(wanted[i], first + rows[i], places[i]);
        return;
    }
    u64 begins[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        begins[i] = load_if(wanted[i], arena.buckets + (wanted[i] ? bucket_of(table, rows[i]) : 0u), NO_BUCKET);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u64 at = begins[i] + (rows[i] >> (table.shifts >> 8 & 0xFFu));
        places[i] = load_if(begins[i] != NO_BUCKET, first + at, places[i]);
    }
}

// Whether there is a row at the place: it is not another node's, nor behind the end of a bag.
__device__ __forceinline__ bool has_row(u32 place) { return place < NO_VALUE; }

__device__ __forceinline__ u32 owner_at(const ArenaParams& arena, u32 place) {
    return place & ((1u << arena.owner_bits) - 1u);
}

// Addresses of the rows at places as `find_places` gives them. Numbers, since of a place without a row it may be none.
template <int N>
__device__ __forceinline__ void rows_at(
    const ArenaParams& arena, u32 number, const TableParams& table, u64 begin, const u32 (&places)[N], u64 (&rows)[N]) {
    if (table.owner_after) {
#pragma unroll
        for (int i = 0; i < N; ++i) rows[i] = begin + static_cast<u64>(places[i]) * arena.row_stride;
        return;
    }
    const u64* const starts = arena.starts + number * (arena.num_cards + 2u);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u32 place = has_row(places[i]) ? places[i] : 0u;
        const u32 owner = owner_at(arena, place);
        const u64 start = __ldg(starts + owner);
        rows[i] = reinterpret_cast<u64>(arena.rows[owner]) +
                  (start + static_cast<u64>(place >> arena.owner_bits) * arena.row_stride);
    }
}

// Counts a bag's values that have no row. Rare: pooling only notes that there is something to count, and one thread of
// the bag reads its values once more.
__device__ __forceinline__ void count_bad(
    const ArenaParams& arena, const BatchParams& batch, uint2 span, const TableParams& table, u64 begin) {
#pragma unroll 1
    for (u32 i = span.x; i < span.y; ++i) {
        const u32 value = __ldg(batch.values + i);
        const bool is_row = value < table.num_rows;
        u32 place[] = {NOT_HERE};
        find_places(arena, table, begin, {is_row}, {value}, place);
        if (place[0] == NOT_HERE) atomicAdd(batch.counters + (is_row ? NOT_HERE_COUNTER : OUTSIDE_COUNTER), 1ull);
    }
}

// Half of a run: table, first, num, mode; or out_offset and out_stride. Not kept by the compiler for the next time.
__device__ __forceinline__ uint4 load_run(const BatchParams& batch, u32 number, u32 half) {
    return load_if(true, reinterpret_cast<const uint4*>(batch.runs + number) + half);
}

// Where a bag's values begin; with mode none, each value is a bag.
__device__ __forceinline__ u32 begin_of_bag(const BatchParams& batch, const uint4& run, u32 bag) {
    return run.w == MODE_NONE ? run.y + bag : __ldg(batch.offsets + run.y + bag);
}

template <class Rows>
__device__ __forceinline__ void pool(const ArenaParams& arena, const BatchParams& batch) {
    u32 block = blockIdx.x + batch.rotation % batch.num_blocks;
    if (block >= batch.num_blocks) block -= batch.num_blocks;
    const uint2 work = __ldg(batch.blocks + block);
    if (work.x == NO_RUN) return;

    const u32 lane = threadIdx.x & ((1u << batch.lanes_log2) - 1u);
    const u32 bag = work.y + (threadIdx.x >> batch.lanes_log2);
    const u32 chunk_number = (blockIdx.y << batch.lanes_log2) + lane;
    const u32 column = chunk_number * Rows::ELEMENTS;
    const uint4 run = load_run(batch, work.x, 0);
    if (bag >= run.z || column >= arena.embedding_dim) return;

    u32 position = begin_of_bag(batch, run, bag);
    const u32 end = begin_of_bag(batch, run, bag + 1);

    const TableParams table = load_table(arena, run.x);
    const u64 begin = keep_whole(begin_of(arena, table));
    const u32 chunk_offset = chunk_number * CHUNK_BYTES;
    const u32 tail_offset = Rows::tail_offset(arena.embedding_dim);

    float sums[Rows::ELEMENTS];
#pragma unroll
    for (int i = 0; i < Rows::ELEMENTS; ++i) sums[i] = 0.0f;
    float biases = 0.0f;
    bool is_bad = false;  // whether some value has no row here

    // Three stages: while rows are on their way, so are the places of the next rows and the values after those.
    u32 values[ROWS_IN_FLIGHT];
    u32 next_places[ROWS_IN_FLIGHT];
    const auto load_values = [&](u32 first) {
#pragma unroll
        for (int i = 0; i < ROWS_IN_FLIGHT; ++i) values[i] = load_if(first + i < end, batch.values + first + i, 0);
    };
    const auto load_places = [&](u32 first) {
        bool is_row[ROWS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
            const bool is_value = first + i < end;
            is_row[i] = is_value && values[i] < table.num_rows;
            next_places[i] = is_value ? NOT_HERE : NO_VALUE;
        }
        find_places(arena, table, begin, is_row, values, next_places);
    };
    load_values(position);
    load_places(position);
    load_values(position + ROWS_IN_FLIGHT);

    for (; position < end; position += ROWS_IN_FLIGHT) {
        uint4 chunks[ROWS_IN_FLIGHT];
        typename Rows::Tail tails[ROWS_IN_FLIGHT];
        u32 weights[ROWS_IN_FLIGHT];
        bool here[ROWS_IN_FLIGHT];
        u64 rows[ROWS_IN_FLIGHT];
        rows_at(arena, run.x, table, begin, next_places, rows);
#pragma unroll
        for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
            here[i] = has_row(next_places[i]);
            is_bad |= next_places[i] == NOT_HERE;
            chunks[i] = load_if(here[i], reinterpret_cast<const uint4*>(rows[i] + chunk_offset));
            tails[i] = Rows::load_tail(here[i], rows[i], tail_offset);
            const u64 weight = reinterpret_cast<u64>(batch.weights) + (position + i) * sizeof(float);
            weights[i] = load_if(here[i] && batch.weights, reinterpret_cast<const u32*>(weight), ONE);
        }
        load_places(position + ROWS_IN_FLIGHT);
        load_values(position + 2 * ROWS_IN_FLIGHT);
#pragma unroll
        for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
            if (here[i]) Rows::add(sums, biases, chunks[i], tails[i], __uint_as_float(weights[i]));
        }
    }

    // Loaded only now, or again: until here they would take registers from the rows in flight.
    const uint4 run_again = load_run(batch, work.x, 0), out = load_run(batch, work.x, 1);
    const u32 first = begin_of_bag(batch, run_again, bag);
    if (is_bad && chunk_number == 0) count_bad(arena, batch, make_uint2(first, end), table, begin);
    const u32 length = run_again.w == MODE_MEAN ? end - first : 0;
    const float factor = length ? 1.0f / static_cast<float>(length) : 1.0f;
#pragma unroll
    for (int i = 0; i < Rows::ELEMENTS; ++i) sums[i] = (sums[i] + biases) * factor;
    const i64 out_offset = static_cast<i64>(static_cast<u64>(out.y) << 32 | out.x);
    const i64 out_stride = static_cast<i64>(static_cast<u64>(out.w) << 32 | out.z);
    store(batch, out_offset + static_cast<i64>(bag) * out_stride + column, arena.embedding_dim - column, sums);
}

#define POOL_KERNEL(name, Rows)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS_PER_BLOCK, Rows::MIN_BLOCKS)                    \
        name(const __grid_constant__ ArenaParams arena, const __grid_constant__ BatchParams batch) {     \
        pool<Rows>(arena, batch);                                                                        \
    }
POOL_KERNEL(pool_int8, Int8Rows)
POOL_KERNEL(pool_int4, Int4Rows)
POOL_KERNEL(pool_fp16, Fp16Rows)
POOL_KERNEL(pool_fp32, Fp32Rows)

// ---------------------------------------------------------------------------------------------------------------------
// Row writes

extern "C" __global__ void __launch_bounds__(THREADS_PER_BLOCK)
    write_rows(const __grid_constant__ ArenaParams arena, const __grid_constant__ WriteParams write) {
    const u32 chunks = arena.row_stride / CHUNK_BYTES;
    const u64 index = static_cast<u64>(blockIdx.x) * THREADS_PER_BLOCK + threadIdx.x;
    const u64 row = index / chunks;
    if (row >= write.num_rows) return;

    const u32 number = __ldg(write.numbers + row);
    const TableParams table = load_table(arena, write.table);
    if (number >= table.num_rows) return;
    const u64 begin = begin_of(arena, table);
    u32 place[] = {NOT_HERE};
    find_places(arena, table, begin, {true}, {number}, place);
    if (!has_row(place[0])) return;
    const u32 owner = table.owner_after ? table.owner_after - 1u : owner_at(arena, place[0]);
    const bool on_host = owner == arena.num_cards + 1u;
    if (on_host ? !write.writes_host : owner != write.card && owner != arena.num_cards) return;

    u64 target[1];
    rows_at(arena, write.table, table, begin, place, target);
    store_to(reinterpret_cast<uint4*>(target[0] + (index % chunks) * CHUNK_BYTES),
             __ldg(reinterpret_cast<const uint4*>(write.stored) + index));
}
