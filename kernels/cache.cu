// The key-value cache of 8-bit pages: rounding a full tail into a page, and gathering pages.
//
// A page holds 64 tokens of one layer: keys i8 [heads, size, 64] with a float16 scale per channel [heads, size], values i8 [heads,
// 64, size] with one per token [heads, 64]. Twin of quantkit.infer.cache_int8: scale = max / 127, at least 2^-24, rounded to float16 before it is used.
//
// The second bytes of a page's widest channels are not theirs: quantize_page makes the first bytes, gather_pages reads them.
//
// quantize_page  tail u16 (float16) [2, heads, 64, size] -> keys, values, key_scale, value_scale, all of this page. A block for each
//                head; grid y 0 does keys, 1 values. Bytes moved: 3 for each number. size at most 256.
// gather_pages   table i32 [pages] -> keys, values u16 (bfloat16) [heads, 64 pages, size]; the pools hold [page, ...]. Bytes moved: 3 for each
//                number. Both floors are the copy bandwidth.
#include "quantkit.cuh"

#define TOKENS 64
#define THREADS 256
#define MOST 256 // columns of a head

QK_DEVICE float scale_of(float top) { return qk_max(top / 127.0f, 5.9604644775390625e-08f); }

QK_DEVICE i8 code_of(float value, float scale) { return (i8)(i32)qk_clamp(qk_round(value / scale), -127.0f, 127.0f); }

// Float to bfloat16 bits, half-even.
QK_DEVICE u16 to_brain(float value) {
    u32 bits = qk_bits(value);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

QK_KERNEL QK_BLOCK(THREADS)
quantize_page(const u16 *tail, i8 *keys, i8 *values, u16 *key_scale, u16 *value_scale, i32 heads, i32 size) {
    QK_SHARED(u16, part, TOKENS *(MOST + 2));
    QK_SHARED(u16, scales, MOST);
    i32 head = (i32)blockIdx.x, which = (i32)blockIdx.y, room = size + 2, count = which ? TOKENS : size;
    const u16 *from = tail + ((i64)which * heads + head) * TOKENS * size;
    for (i32 at = (i32)threadIdx.x; at < TOKENS * size; at += THREADS) part[at / size * room + at % size] = from[at];
    __syncthreads();
    for (i32 at = (i32)threadIdx.x; at < count; at += THREADS) {
        float top = 0.0f;
        if (which) {
            for (i32 d = 0; d < size; ++d) top = qk_max(top, qk_abs(qk_from_half(part[at * room + d])));
        } else {
            for (i32 t = 0; t < TOKENS; ++t) top = qk_max(top, qk_abs(qk_from_half(part[t * room + at])));
        }
        scales[at] = qk_to_half(scale_of(top));
        (which ? value_scale : key_scale)[(i64)head * count + at] = scales[at];
    }
    __syncthreads();
    i8 *to = (which ? values : keys) + (i64)head * TOKENS * size;
    for (i32 at = (i32)threadIdx.x; at < TOKENS * size; at += THREADS) {
        i32 token = which ? at / size : at % TOKENS, channel = which ? at % size : at / TOKENS;
        to[at] = code_of(qk_from_half(part[token * room + channel]), qk_from_half(scales[which ? token : channel]));
    }
}

QK_KERNEL QK_BLOCK(THREADS)
gather_pages(const i8 *keys, const i8 *values, const u16 *key_scale, const u16 *value_scale, const i32 *table, u16 *key_out, u16 *value_out,
             i32 heads, i32 size, i32 pages) {
    QK_SHARED(i8, part, TOKENS *(MOST + 4));
    i32 place = (i32)blockIdx.x, head = (i32)blockIdx.y;
    i64 page = table[place], from = (page * heads + head) * TOKENS * size, to = ((i64)head * pages + place) * TOKENS * size;
    i32 room = size + 4;
    for (i32 at = (i32)threadIdx.x; at < TOKENS * size; at += THREADS) part[at % TOKENS * room + at / TOKENS] = keys[from + at];
    __syncthreads();
    for (i32 at = (i32)threadIdx.x; at < TOKENS * size; at += THREADS) {
        i32 token = at / size, channel = at % size;
        float step = qk_from_half(key_scale[(page * heads + head) * size + channel]);
        key_out[to + at] = to_brain((float)part[token * room + channel] * step);
        float other = qk_from_half(value_scale[(page * heads + head) * TOKENS + token]);
        value_out[to + at] = to_brain((float)values[from + at] * other);
    }
}
