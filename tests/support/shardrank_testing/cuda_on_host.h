// What kernels.cu needs of CUDA C++, for a host compiler: each thread of a grid gets its turn, one after the other.
//
// For tests without a GPU. Kernels in which no thread takes anything from a later one give the same answer so. Vector
// types have the card's alignment, so that -fsanitize=undefined finds a load that would be misaligned there. Compile
// kernels.cu after `#define SHARDRANK_ON_HOST` and this file, and name after it each kernel that is to be launched:
// CUDA_ON_HOST_KERNEL(pool_int8)

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---------------------------------------------------------------------------------------------------------------------
// Whose turn it is. Of the calling thread: several may launch at once.

namespace cuda_on_host {
struct Index {
    unsigned int x, y;
};
inline thread_local Index block_index;
inline thread_local Index thread_index;

template <class... Params, std::size_t... Numbers>
void run_grid(void (*kernel)(Params...), unsigned int blocks_x, unsigned int blocks_y, unsigned int threads,
              const void* const* params, std::index_sequence<Numbers...>) {
    for (unsigned int y = 0; y < blocks_y; ++y) {
        for (unsigned int x = 0; x < blocks_x; ++x) {
            block_index = {x, y};
            for (unsigned int thread = 0; thread < threads; ++thread) {
                thread_index = {thread, 0};
                kernel(*static_cast<const Params*>(params[Numbers])...);
            }
        }
    }
}

// The bytes that a kernel takes by value, parameter by parameter, into sizes[0 .. 8); returns how many parameters.
template <class... Params>
unsigned int param_sizes(void (*)(Params...), unsigned int* sizes) {
    const unsigned int all[] = {static_cast<unsigned int>(sizeof(Params))...};
    for (unsigned int size : all) *sizes++ = size;
    return sizeof...(Params);
}

template <class... Params>
void launch(void (*kernel)(Params...), unsigned int blocks_x, unsigned int blocks_y, unsigned int threads,
            const void* const* params) {
    run_grid(kernel, blocks_x, blocks_y, threads, params, std::index_sequence_for<Params...>{});
}
}  // namespace cuda_on_host

#define blockIdx cuda_on_host::block_index
#define threadIdx cuda_on_host::thread_index

#define CUDA_ON_HOST_KERNEL(kernel)                                                                                \
    extern "C" void launch_##kernel(unsigned int blocks_x, unsigned int blocks_y, unsigned int threads,            \
                                    const void* const* params) {                                                   \
        cuda_on_host::launch(kernel, blocks_x, blocks_y, threads, params);                                         \
    }                                                                                                              \
    extern "C" unsigned int params_of_##kernel(unsigned int* sizes) { return cuda_on_host::param_sizes(kernel, sizes); }

// ---------------------------------------------------------------------------------------------------------------------
// Intrinsics

using std::min;

template <class T>
inline T __ldg(const T* address) {
    return *address;
}

template <class T>
inline void store_to(T* address, const T& value) {
    *address = value;
}

inline unsigned long long keep_whole(unsigned long long address) { return address; }

// What is not wanted is poison, so that a use of it is seen.
template <class T>
inline T load_if(bool wanted, const T* address) {
    if (wanted) return __ldg(address);
    T poison;
    std::memset(&poison, 0xA5, sizeof poison);
    return poison;
}

inline unsigned int load_if(bool wanted, const unsigned int* address, unsigned int otherwise) {
    return wanted ? __ldg(address) : otherwise;
}

inline unsigned long long load_if(bool wanted, const unsigned long long* address, unsigned long long otherwise) {
    return wanted ? __ldg(address) : otherwise;
}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline float __uint_as_float(unsigned int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Byte n of the result is byte (selector >> 4n) % 8 of y:x. The sign-spreading form is not there.
inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
    const std::uint64_t both = static_cast<std::uint64_t>(y) << 32 | x;
    unsigned int result = 0;
    for (int n = 0; n < 4; ++n) {
        const unsigned int number = selector >> 4 * n & 7u;
        result |= static_cast<unsigned int>(both >> 8 * number & 0xFFu) << 8 * n;
    }
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Conversions of 16-bit floats, two in a word: from IEEE 754 binary16, and to bfloat16, to nearest even.

namespace cuda_on_host {
inline float half_to_float(unsigned int half) {
    const unsigned int sign = (half & 0x8000u) << 16;
    const unsigned int exponent = half >> 10 & 0x1Fu;
    const unsigned int fraction = half & 0x3FFu;
    if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

inline unsigned int float_to_bfloat(float value) {
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
    return (bits >> 16) + ((bits & 0xFFFFu) > 0x8000u || ((bits & 0xFFFFu) == 0x8000u && (bits >> 16 & 1u)));
}
}  // namespace cuda_on_host

inline float2 halves_to_floats(unsigned int pair) {
    return {cuda_on_host::half_to_float(pair & 0xFFFFu), cuda_on_host::half_to_float(pair >> 16)};
}

inline unsigned int floats_to_bfloats(float low, float high) {
    return cuda_on_host::float_to_bfloat(high) << 16 | cuda_on_host::float_to_bfloat(low);
}
