// Decoding: y = x WT for 1 to 8 rows of x, straight from packed weights; a warp for each row of W.
//
//   x   u16 [rows, columns], float16 bits (brain 0) or bfloat16 bits (brain 1)     y  f32 [rows, out]
//
// groups4  4-bit codes in planes of 32 columns (byte j: column j low, column j + 16 high nibble): packed u8 [out, columns / 2]; scale f16
//          [out, columns / group]; zero u8 [out, columns / group], or none and `middle`; group a multiple of 32.
// q4_k, q6_k, q8_0  blocks of ggml, u8 [out, bytes of a row].
//
// Products and sums are float; a lane sums its own runs of columns, the warp adds the lanes by a fixed tree, so a row of y does not
// depend on how many rows x has. Bytes moved: the packed weight once, x from the second-level cache: the floor is packed bytes /
// bandwidth. Operations: 2 rows out columns.
#include "quantkit.cuh"

#define WARPS 8
#define THREADS 256
#define ROWS 8

struct Inputs {
    const u16 *x;
    i32 rows, columns, brain;
    QK_INLINE float at(i32 row, i32 column) const {
        u16 bits = x[(i64)row * columns + column];
        return brain ? qk_from_brain(bits) : qk_from_half(bits);
    }
};

// Adds to each row's sum: scale times the sum of code x, plus shift times the sum of x, over 16 columns.
QK_DEVICE void add16(float *sums, const Inputs &inputs, i32 column, const float *codes, float scale, float shift) {
    for (i32 row = 0; row < inputs.rows; ++row) {
        float product = 0.0f, plain = 0.0f;
        QK_UNROLL for (i32 j = 0; j < 16; ++j) {
            float x = inputs.at(row, column + j);
            product = product + codes[j] * x;
            plain = plain + x;
        }
        sums[row] = sums[row] + (scale * product + shift * plain);
    }
}

QK_DEVICE void finish(const float *sums, float *y, const Inputs &inputs, i32 out, i32 place, i32 lane) {
    for (i32 row = 0; row < inputs.rows; ++row) {
        float sum = sums[row];
        for (i32 step = 16; step; step >>= 1) sum = sum + QK_SHUFFLE_XOR(sum, step);
        if (lane == 0) y[(i64)row * out + place] = sum;
    }
}

QK_DEVICE u16 half_at(const u8 *bytes) { return (u16)(bytes[0] | bytes[1] << 8); }

#define QK_MATVEC                                                                                                                          \
    i32 lane = (i32)threadIdx.x & 31, place = (i32)blockIdx.x * WARPS + (i32)threadIdx.x / 32;                                             \
    if (place >= out) return;                                                                                                              \
    Inputs inputs = {x, rows, columns, brain};                                                                                             \
    float sums[ROWS], codes[16];                                                                                                           \
    QK_UNROLL for (i32 row = 0; row < ROWS; ++row) sums[row] = 0.0f;

QK_KERNEL QK_BLOCK(THREADS)
groups4(const u16 *x, float *y, i32 rows, i32 columns, i32 brain, i32 out, const u8 *packed, const u16 *scale, const u8 *zero, i32 middle,
        i32 group) {
    QK_MATVEC
    i32 groups = columns / group;
    for (i32 run = lane; run < columns / 32; run += 32) {
        const u8 *from = packed + (i64)place * (columns / 2) + run * 16;
        i64 at = (i64)place * groups + run * 32 / group;
        float step = qk_from_half(scale[at]), shift = -step * (zero ? (float)zero[at] : (float)middle);
        QK_UNROLL for (i32 half = 0; half < 2; ++half) {
            QK_UNROLL for (i32 j = 0; j < 16; ++j) codes[j] = (float)((from[j] >> (4 * half)) & 15);
            add16(sums, inputs, run * 32 + 16 * half, codes, step, shift);
        }
    }
    finish(sums, y, inputs, out, place, lane);
}

QK_KERNEL QK_BLOCK(THREADS)
q4_k(const u16 *x, float *y, i32 rows, i32 columns, i32 brain, i32 out, const u8 *packed) {
    QK_MATVEC
    for (i32 part = lane; part < columns / 32; part += 32) {
        const u8 *block = packed + ((i64)place * (columns / 256) + part / 8) * 144, *six = block + 4;
        i32 sub = part % 8;
        i32 level = sub < 4 ? six[sub] & 63 : (six[sub + 4] & 15) | (six[sub - 4] >> 6) << 4;
        i32 low = sub < 4 ? six[sub + 4] & 63 : six[sub + 4] >> 4 | (six[sub] >> 6) << 4;
        float step = qk_from_half(half_at(block)) * (float)level, shift = -(qk_from_half(half_at(block + 2)) * (float)low);
        const u8 *from = block + 16 + sub / 2 * 32;
        QK_UNROLL for (i32 half = 0; half < 2; ++half) {
            QK_UNROLL for (i32 j = 0; j < 16; ++j) codes[j] = (float)((from[16 * half + j] >> (4 * (sub & 1))) & 15);
            add16(sums, inputs, part * 32 + 16 * half, codes, step, shift);
        }
    }
    finish(sums, y, inputs, out, place, lane);
}

QK_KERNEL QK_BLOCK(THREADS)
q6_k(const u16 *x, float *y, i32 rows, i32 columns, i32 brain, i32 out, const u8 *packed) {
    QK_MATVEC
    for (i32 part = lane; part < columns / 16; part += 32) {
        const u8 *block = packed + ((i64)place * (columns / 256) + part / 16) * 210;
        i32 sub = part % 16, half = sub / 8, row = sub % 8 / 2, from = 16 * (sub & 1);  // 32 codes each: row 0..3 of a half
        float step = qk_from_half(half_at(block + 208)) * (float)(i8)block[192 + sub];
        QK_UNROLL for (i32 j = 0; j < 16; ++j) {
            i32 low = block[64 * half + 32 * (row & 1) + from + j] >> (4 * (row / 2)) & 15;
            i32 top = block[128 + 32 * half + from + j] >> (2 * row) & 3;
            codes[j] = (float)(low | top << 4);
        }
        add16(sums, inputs, part * 16, codes, step, -32.0f * step);
    }
    finish(sums, y, inputs, out, place, lane);
}

QK_KERNEL QK_BLOCK(THREADS)
q8_0(const u16 *x, float *y, i32 rows, i32 columns, i32 brain, i32 out, const u8 *packed) {
    QK_MATVEC
    for (i32 part = lane; part < columns / 32; part += 32) {
        const u8 *block = packed + ((i64)place * (columns / 32) + part) * 34;
        float step = qk_from_half(half_at(block));
        QK_UNROLL for (i32 half = 0; half < 2; ++half) {
            QK_UNROLL for (i32 j = 0; j < 16; ++j) codes[j] = (float)(i8)block[2 + 16 * half + j];
            add16(sums, inputs, part * 32 + 16 * half, codes, step, 0.0f);
        }
    }
    finish(sums, y, inputs, out, place, lane);
}
