// Reads int8 rows at random, as the pooling kernels do, but computes the address of each: no ids, places or offsets are
// loaded, and next to nothing is written. What it reaches is the most that pooling could.
//
// A lane group reads rows_per_group rows, IN_FLIGHT to a step of the loop; each of its threads reads 16 bytes of a row
// and the row's scale and bias. GatherParams: see rows.py.

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 THREADS_PER_BLOCK = 256;
constexpr u32 CHUNK_BYTES = 16;

struct GatherParams {
    u64 rows;
    u64 sums;
    u32 num_rows;
    u32 row_stride;
    u32 chunks;
    u32 tail_offset;
    u32 first;
    u32 num_reads;
    u32 rows_per_group;
    u32 lanes_log2;
};

// The 32-bit finalizer of MurmurHash3: every number becomes another one.
__device__ __forceinline__ u32 mixed(u32 x) {
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

#ifndef SHARDRANK_ON_HOST
// Volatile, so that the loads of several rows stay together, ahead of what uses them.
__device__ __forceinline__ uint4 load(const uint4* address) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

__device__ __forceinline__ uint2 load(const uint2* address) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}
#else
inline uint4 load(const uint4* address) { return __ldg(address); }
inline uint2 load(const uint2* address) { return __ldg(address); }
#endif

template <int IN_FLIGHT>
__device__ __forceinline__ void gather(const GatherParams& params) {
    const u32 thread = blockIdx.x * THREADS_PER_BLOCK + threadIdx.x;
    const u32 lane = thread & ((1u << params.lanes_log2) - 1u);
    const u32 begin = (thread >> params.lanes_log2) * params.rows_per_group;
    if (begin >= params.num_reads || lane >= params.chunks) return;
    const u32 left = params.num_reads - begin;
    const u32 count = left < params.rows_per_group ? left : params.rows_per_group;

    u32 sum = 0;
    for (u32 done = 0; done < count; done += IN_FLIGHT) {
        uint4 chunks[IN_FLIGHT];
        uint2 tails[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            // What is behind the end is read again and not added: a branch would part the loads.
            const u32 read = params.first + begin + (done + i < count ? done + i : done);
            const u64 row = static_cast<u64>(mixed(read)) * params.num_rows >> 32;
            const u64 address = params.rows + row * params.row_stride;
            chunks[i] = load(reinterpret_cast<const uint4*>(address + lane * CHUNK_BYTES));
            tails[i] = load(reinterpret_cast<const uint2*>(address + params.tail_offset));
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const u32 words = chunks[i].x + chunks[i].y + chunks[i].z + chunks[i].w + tails[i].x + tails[i].y;
            sum += done + i < count ? words : 0u;
        }
    }
    reinterpret_cast<u32*>(params.sums)[thread] = sum;
}

#define GATHER_KERNEL(name, IN_FLIGHT)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS_PER_BLOCK) name(const __grid_constant__ GatherParams params) { \
        gather<IN_FLIGHT>(params);                                                                         \
    }
GATHER_KERNEL(gather_4, 4)
GATHER_KERNEL(gather_8, 8)
