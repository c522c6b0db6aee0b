// What every kernel shares: types, bit tricks, and names for the few things that a GPU and the tests' C++ do differently.
//
// NVRTC compiles the kernels without any include path but this folder, so nothing is included. The tests compile the same
// sources as C++ behind a header that defines QK_SHIM (tests/shim/cuda_shim.h): one fiber for each thread of a block.
//
// All float operations are rounded one by one (--fmad=false; --ftz=false, IEEE division and root are the default), so
// codes and bytes equal the reference's. Shared memory is declared by QK_SHARED, which the shim fills with garbage first.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;
typedef unsigned long long u64;

#ifndef QK_SHIM
#define QK_KERNEL extern "C" __global__ void
#define QK_INLINE __device__ __forceinline__
#define QK_DEVICE [[maybe_unused]] static QK_INLINE
#define QK_ROLLED _Pragma("unroll 1")
#define QK_SHARED(type, name, count) __shared__ type name[count]
#define QK_UNROLL _Pragma("unroll")
#define QK_BLOCK(threads) __launch_bounds__(threads, 2)
#define QK_INFINITY __int_as_float(0x7f800000)
QK_DEVICE u32 qk_bits(float value) { return __float_as_uint(value); }
QK_DEVICE float qk_float(u32 bits) { return __uint_as_float(bits); }
QK_DEVICE float qk_root(float value) { return __fsqrt_rn(value); }
// float16 bits to float; exact.
QK_DEVICE float qk_from_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
#endif

// A warp does these together, all 32 lanes.
#define QK_ALL 0xffffffffu
#define QK_SHUFFLE(value, lane) __shfl_sync(QK_ALL, value, lane)
#define QK_SHUFFLE_XOR(value, mask) __shfl_xor_sync(QK_ALL, value, mask)

QK_DEVICE float qk_min(float a, float b) { return a < b ? a : b; }
QK_DEVICE float qk_max(float a, float b) { return a > b ? a : b; }
QK_DEVICE float qk_abs(float a) { return qk_float(qk_bits(a) & 0x7fffffffu); }
QK_DEVICE float qk_clamp(float a, float low, float high) { return qk_min(qk_max(a, low), high); }
QK_DEVICE float qk_from_brain(u16 bits) { return qk_float((u32)bits << 16); }

// Rounds half-even by adding 1.5 * 2^23: right for |value| < 2^22, and beyond it a clamp to a code decides anyway.
QK_DEVICE float qk_round(float value) { return (value + 12582912.0f) - 12582912.0f; }

// As ggml rounds: the same sum, but its low 23 bits are read as an integer, which wraps beyond +-4194303.
QK_DEVICE float qk_nearest(float value) { return (float)((i32)(qk_bits(value + 12582912.0f) & 0x7fffffu) - 0x400000); }

// Float to float16 bits, half-even, with subnormals and infinity.
QK_DEVICE u16 qk_to_half(float value) {
    u32 bits = qk_bits(value), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size >= 0x7f800000u) return (u16)(sign | 0x7c00u | (size > 0x7f800000u ? 0x200u : 0u));
    if (size >= 0x477ff000u) return (u16)(sign | 0x7c00u);
    if (size < 0x38800000u) {  // subnormal: the sum with 0.5 leaves the code in the low bits, rounded
        return (u16)(sign | (qk_bits(qk_float(size) + 0.5f) - 0x3f000000u));
    }
    return (u16)(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13));
}

QK_DEVICE float qk_as_half(float value) { return qk_from_half(qk_to_half(value)); }

// a / b, and 0 where b is 0.
QK_DEVICE float qk_divide(float a, float b) { return b == 0.0f ? 0.0f : a / b; }
