// ggml's K types and Q8_0: search and packing, a thread for each sub-block (Q8_0: block), byte for byte what llama-quantize writes.
//
// Twins of quantkit.codecs.k_quants: every sum runs over the elements in their order inside one thread, so the bytes are the
// reference's. A super-block's 8 or 16 threads share its scales through shared memory; codes go through it too, so that bytes are
// stored side by side.
//
// q2_k .. q6_k  source f32 [count, 256], importance f32 [per_row, 256] or none, out u8 [count, size]; per_row: super-blocks of a row.
// q8_0          source f32 [count, 32], out u8 [count, 34].
// Bytes moved for a super-block: 1024 read, 84 to 210 written. Operations: up to 37 candidates of 12 operations a weight (Q4_K: 21), so
// the floor is arithmetic; Q8_0's is the copy bandwidth. One thread keeps its 16 or 32 weights and their importance in registers.
#include "quantkit.cuh"

#define THREADS 128
#define EPSILON 1e-15f
#define SWEEPS 5

template <int N> struct Part {
    float x[N], w[N];
};

// A scale for codes 0..2 high - 1 that stand for scale * (code - high), and the step that gives the codes; step 0: dead.
struct Signed {
    float scale, step;
};

template <int N> QK_DEVICE float signed_absmax(const float *x) {
    float best = 0.0f, size = 0.0f;
    QK_UNROLL for (i32 j = 0; j < N; ++j) {
        if (qk_abs(x[j]) > size) {
            size = qk_abs(x[j]);
            best = x[j];
        }
    }
    return best;
}

QK_DEVICE float level_of(float step, float x, i32 high) { return qk_clamp(qk_nearest(step * x), (float)-high, (float)(high - 1)); }

template <int N> QK_DEVICE void level_sums(const float *x, const float *w, float step, i32 high, float &along, float &energy) {
    along = 0.0f;
    energy = 0.0f;
    QK_UNROLL for (i32 j = 0; j < N; ++j) {
        float level = level_of(step, x[j], high);
        along = along + (w[j] * x[j]) * level;
        energy = energy + (w[j] * level) * level;
    }
}

// Nineteen steps around high / extreme.
template <int N> QK_DEVICE Signed symmetric(const float *x, const float *w, i32 high) {
    float extreme = signed_absmax<N>(x), along, energy;
    Signed found = {0.0f, 0.0f};
    if (qk_abs(extreme) < EPSILON) return found;
    found.step = (float)-high / extreme;
    level_sums<N>(x, w, found.step, high, along, energy);
    found.scale = qk_divide(along, energy);
    float best = found.scale * along;
    for (i32 k = -9; k < 10; ++k) {
        if (k == 0) continue;
        float step = -((float)high + 0.1f * (float)k) / extreme;
        level_sums<N>(x, w, step, high, along, energy);
        if (energy > 0.0f && along * along > best * energy) {
            found.step = step;
            found.scale = qk_divide(along, energy);
            best = found.scale * along;
        }
    }
    return found;
}

// Moves single levels in up to five sweeps; along and energy become the sums of (w x) l and (w l) l.
template <int N>
QK_DEVICE void move(float *level, const float *x, const float *w, float low, float top, float least, float &along, float &energy) {
    along = 0.0f;
    energy = 0.0f;
    QK_UNROLL for (i32 j = 0; j < N; ++j) along = along + (w[j] * x[j]) * level[j];
    QK_UNROLL for (i32 j = 0; j < N; ++j) energy = energy + (w[j] * level[j]) * level[j];
    for (i32 sweep = 0; sweep < SWEEPS; ++sweep) {
        bool moved = false;
        QK_UNROLL for (i32 j = 0; j < N; ++j) {
            float a = along - (w[j] * x[j]) * level[j], b = energy - (w[j] * level[j]) * level[j];
            float next = qk_clamp(qk_nearest(qk_divide(x[j] * b, a > 0.0f ? a : 0.0f)), low, top);
            float c = a + (w[j] * x[j]) * next, d = b + (w[j] * next) * next;
            if (a > 0.0f && b > least && next != level[j] && d > 0.0f && (c * c) * energy > (along * along) * d) {
                level[j] = next;
                along = c;
                energy = d;
                moved = true;
            }
        }
        if (!moved) break;
    }
}

// A scale for codes 0..high of values that are not negative: nine steps, then single moves. Returns the scale, fills codes.
template <int N> QK_DEVICE float positive(const float *x, const float *w, i32 high, float *codes) {
    float top = 0.0f, most = (float)high;
    QK_UNROLL for (i32 j = 0; j < N; ++j) top = qk_max(top, x[j]);
    if (top < EPSILON) {
        QK_UNROLL for (i32 j = 0; j < N; ++j) codes[j] = 0.0f;
        return 0.0f;
    }
    float chosen = most / top, best = 0.0f;
    for (i32 k = -5; k < 5; ++k) {  // the first is the plain step
        if (k == 0) continue;
        float step = k == -5 ? chosen : (0.1f * (float)k + most) / top, error = 0.0f, inverse = 1.0f / step;
        QK_UNROLL for (i32 j = 0; j < N; ++j) {
            float rest = x[j] - inverse * qk_min(qk_nearest(step * x[j]), most);
            error = error + (w[j] * rest) * rest;
        }
        if (k == -5 || error < best) {
            best = error;
            chosen = step;
        }
    }
    QK_UNROLL for (i32 j = 0; j < N; ++j) codes[j] = qk_min(qk_nearest(chosen * x[j]), most);
    float along, energy;
    move<N>(codes, x, w, -QK_INFINITY, most, 0.0f, along, energy);
    return qk_divide(along, energy);
}

// scale * code - minimum for codes 0..high; step and base give the codes.
struct Affine {
    float scale, minimum, step, base;
    bool flat;
};

struct Span {
    float first, width;
    i32 count;
    bool absolute;
};

template <int N> QK_DEVICE float affine_loss(const Part<N> &part, float scale, float low, float step, float base, float high, bool absolute) {
    float sum = 0.0f;
    QK_UNROLL for (i32 j = 0; j < N; ++j) {
        float level = qk_clamp(qk_nearest(step * (part.x[j] - base)), 0.0f, high), rest = (scale * level + low) - part.x[j];
        sum = sum + part.w[j] * (absolute ? qk_abs(rest) : rest * rest);
    }
    return sum;
}

template <int N> QK_DEVICE Affine affine(const Part<N> &part, i32 most, Span span) {
    float low = part.x[0], top = part.x[0], sum_w = 0.0f, sum_x = 0.0f, high = (float)most;
    QK_UNROLL for (i32 j = 1; j < N; ++j) {
        low = qk_min(part.x[j], low);
        top = qk_max(part.x[j], top);
    }
    QK_UNROLL for (i32 j = 0; j < N; ++j) sum_w = sum_w + part.w[j];
    QK_UNROLL for (i32 j = 0; j < N; ++j) sum_x = sum_x + part.w[j] * part.x[j];
    if (low > 0.0f) low = 0.0f;
    Affine found = {0.0f, -low, 0.0f, low, top <= low};
    if (found.flat) return found;
    found.step = qk_divide(high, top - low);
    found.scale = qk_divide(1.0f, found.step);
    float best = affine_loss<N>(part, found.scale, low, found.step, low, high, span.absolute);
    for (i32 k = 0; k <= span.count; ++k) {
        float step = qk_divide((span.first + span.width * (float)k) + high, top - low), sum_l = 0.0f, energy = 0.0f, along = 0.0f;
        QK_UNROLL for (i32 j = 0; j < N; ++j) {
            float level = qk_clamp(qk_nearest(step * (part.x[j] - low)), 0.0f, high), heavy = part.w[j] * level;
            sum_l = sum_l + heavy;
            energy = energy + heavy * level;
            along = along + heavy * part.x[j];
        }
        float det = sum_w * energy - sum_l * sum_l;
        if (!(det > 0.0f)) continue;
        float scale = qk_divide(sum_w * along - sum_x * sum_l, det), next = qk_divide(energy * sum_x - sum_l * along, det);
        if (next > 0.0f) {
            next = 0.0f;
            scale = qk_divide(along, energy);
        }
        float error = affine_loss<N>(part, scale, next, step, low, high, span.absolute);
        if (error < best) {
            best = error;
            found.scale = scale;
            found.step = step;
            found.base = low;
            low = next;
        }
    }
    found.minimum = -low;
    return found;
}

// What the threads of a block share: floats for each thread, codes, and the halves of each super-block.
template <int SUB> struct Room {
    static const i32 SUBS = 256 / SUB, SUPERS = THREADS / SUBS;
    float *first, *second, *third, *scales, *lows;
    u8 *codes;
    u16 *halves;
    i32 super, sub;
    i64 block;
    bool live;
};

#define QK_ROOM(SUB)                                                                                                                       \
    QK_SHARED(float, shared_floats, 5 * THREADS);                                                                                          \
    QK_SHARED(u8, shared_codes, THREADS *SUB);                                                                                             \
    QK_SHARED(u16, shared_halves, 2 * THREADS * SUB / 256);                                                                                \
    Room<SUB> room;                                                                                                                        \
    room.super = (i32)threadIdx.x / Room<SUB>::SUBS;                                                                                       \
    room.sub = (i32)threadIdx.x % Room<SUB>::SUBS;                                                                                         \
    room.block = (i64)blockIdx.x * Room<SUB>::SUPERS + room.super;                                                                         \
    room.live = room.block < count;                                                                                                        \
    room.first = shared_floats + room.super * Room<SUB>::SUBS;                                                                             \
    room.second = room.first + THREADS;                                                                                                    \
    room.third = room.second + THREADS;                                                                                                    \
    room.scales = room.third + THREADS;                                                                                                    \
    room.lows = room.scales + THREADS;                                                                                                     \
    room.codes = shared_codes + room.super * 256;                                                                                          \
    room.halves = shared_halves + 2 * room.super;

template <int SUB> QK_DEVICE void load(Part<SUB> &part, const Room<SUB> &room, const float *source, const float *importance, i32 per_row) {
    QK_UNROLL for (i32 j = 0; j < SUB; ++j) {
        part.x[j] = room.live ? source[room.block * 256 + room.sub * SUB + j] : 0.0f;
        part.w[j] = room.live && importance ? importance[room.block % per_row * 256 + room.sub * SUB + j] : 0.0f;
    }
}

// importance * sqrt(floor + x^2), the floor being `share` of the super-block's sum of squares, summed in its order.
template <int SUB> QK_DEVICE void weigh(Part<SUB> &part, const Room<SUB> &room, float share) {
    for (i32 turn = 0; turn < Room<SUB>::SUBS; ++turn) {
        if (room.sub == turn) {
            float sum = turn ? room.first[turn - 1] : 0.0f;
            QK_UNROLL for (i32 j = 0; j < SUB; ++j) sum = sum + part.x[j] * part.x[j];
            room.first[turn] = sum;
        }
        __syncthreads();
    }
    float ground = room.first[Room<SUB>::SUBS - 1] * share / 256.0f;
    QK_UNROLL for (i32 j = 0; j < SUB; ++j) part.w[j] = part.w[j] * qk_root(ground + part.x[j] * part.x[j]);
    __syncthreads();
}

template <int SUB> QK_DEVICE float weight_sum(const Part<SUB> &part) {
    float sum = 0.0f;
    QK_UNROLL for (i32 j = 0; j < SUB; ++j) sum = sum + part.w[j];
    return sum;
}

// Rounds a value of a super-block to codes 0..high of the common scale of `values`; d becomes that scale.
template <int SUBS> QK_DEVICE float common_level(const float *values, float value, i32 levels, float &d) {
    float top = 0.0f, high = (float)levels;
    QK_UNROLL for (i32 s = 0; s < SUBS; ++s) top = values[s] > top ? values[s] : top;  // a minimum of -0 leaves 0
    d = top / high;
    return qk_min((float)((i32)qk_nearest(qk_divide(high, top) * value) & 255), high);
}

QK_DEVICE u8 quarters(const u8 *codes, i32 at, i32 shift, u32 mask) {
    i32 from = at / 32 * 128 + at % 32;
    u32 byte = 0;
    QK_UNROLL for (i32 k = 0; k < 4; ++k) byte |= ((codes[from + 32 * k] >> shift) & mask) << (2 * k);
    return (u8)byte;
}

QK_DEVICE u8 byte_of(u16 half, i32 at) { return (u8)(half >> (8 * at)); }

// Byte `at` of the twelve that hold eight six-bit pairs.
QK_DEVICE u8 six(const float *scales, const float *lows, i32 at) {
    if (at < 8) {
        const float *from = at < 4 ? scales : lows;
        return (u8)((u32)from[at & 3] | ((u32)from[4 + (at & 3)] >> 4 << 6));
    }
    return (u8)(((u32)scales[at - 4] & 15u) | (((u32)lows[at - 4] & 15u) << 4));
}

template <int SUB, int BITS> struct Layout;

template <> struct Layout<16, 2> {
    static const i32 SIZE = 84;
    QK_INLINE static u8 byte(const Room<16> &room, i32 at) {
        if (at < 16) return (u8)((u32)room.scales[at] | ((u32)room.lows[at] << 4));
        if (at < 80) return quarters(room.codes, at - 16, 0, 3u);
        return byte_of(room.halves[(at - 80) / 2], at & 1);
    }
};

template <> struct Layout<32, 4> {
    static const i32 SIZE = 144;
    QK_INLINE static u8 byte(const Room<32> &room, i32 at) {
        if (at < 4) return byte_of(room.halves[at / 2], at & 1);
        if (at < 16) return six(room.scales, room.lows, at - 4);
        i32 from = (at - 16) / 32 * 64 + (at - 16) % 32;
        return (u8)((room.codes[from] & 15) | room.codes[from + 32] << 4);
    }
};

template <> struct Layout<32, 5> {
    static const i32 SIZE = 176;
    QK_INLINE static u8 byte(const Room<32> &room, i32 at) {
        if (at < 4) return byte_of(room.halves[at / 2], at & 1);
        if (at < 16) return six(room.scales, room.lows, at - 4);
        if (at < 48) {
            u32 byte = 0;
            QK_UNROLL for (i32 g = 0; g < 8; ++g) byte |= (u32)(room.codes[32 * g + at - 16] >> 4) << g;
            return (u8)byte;
        }
        i32 from = (at - 48) / 32 * 64 + (at - 48) % 32;
        return (u8)((room.codes[from] & 15) | (room.codes[from + 32] & 15) << 4);
    }
};

template <> struct Layout<16, 3> {
    static const i32 SIZE = 110;
    QK_INLINE static u8 byte(const Room<16> &room, i32 at) {
        u32 byte = 0;
        if (at < 32) {
            QK_UNROLL for (i32 g = 0; g < 8; ++g) byte |= (u32)(room.codes[32 * g + at] >> 2) << g;
        } else if (at < 96) {
            return quarters(room.codes, at - 32, 0, 3u);
        } else if (at < 104) {
            byte = ((u32)room.scales[at - 96] & 15u) | (((u32)room.scales[at - 88] & 15u) << 4);
        } else if (at < 108) {
            QK_UNROLL for (i32 k = 0; k < 4; ++k) byte |= ((u32)room.scales[4 * k + at - 104] >> 4) << (2 * k);
        } else {
            return byte_of(room.halves[0], at & 1);
        }
        return (u8)byte;
    }
};

template <> struct Layout<16, 6> {
    static const i32 SIZE = 210;
    QK_INLINE static u8 byte(const Room<16> &room, i32 at) {
        if (at < 128) {
            i32 from = at / 64 * 128 + at % 64;
            return (u8)((room.codes[from] & 15) | (room.codes[from + 64] & 15) << 4);
        }
        if (at < 192) return quarters(room.codes, at - 128, 4, 3u);
        if (at < 208) return (u8)(i8)(i32)room.scales[at - 192];
        return byte_of(room.halves[0], at & 1);
    }
};

template <int SUB, int BITS> QK_DEVICE void store(const Room<SUB> &room, u8 *out) {
    __syncthreads();
    if (!room.live) return;
    const i32 SIZE = Layout<SUB, BITS>::SIZE;
    for (i32 at = room.sub; at < SIZE; at += Room<SUB>::SUBS) out[room.block * SIZE + at] = Layout<SUB, BITS>::byte(room, at);
}

// Q2_K, Q4_K, Q5_K: d * scale * code - dmin * minimum.
template <int SUB, int BITS>
QK_DEVICE void minimum(const Room<SUB> &room, const float *source, const float *importance, u8 *out, i32 per_row, i32 levels, Span span,
                       float share) {
    const i32 SUBS = Room<SUB>::SUBS, high = (1 << BITS) - 1;
    Part<SUB> part;
    load<SUB>(part, room, source, importance, per_row);
    if (importance) {
        weigh<SUB>(part, room, share);
        Span other = {-0.9f, 0.05f, 36, false};
        span = other;
    } else {
        float sum = 0.0f;
        QK_UNROLL for (i32 j = 0; j < SUB; ++j) sum = sum + part.x[j] * part.x[j];
        float ground = qk_root(sum / (float)SUB);
        QK_UNROLL for (i32 j = 0; j < SUB; ++j) part.w[j] = BITS == 2 ? qk_abs(part.x[j]) : ground + qk_abs(part.x[j]);
    }
    Affine found = affine<SUB>(part, high, span);
    float d = 0.0f, dmin = 0.0f, scale, low;
    room.first[room.sub] = found.flat ? 0.0f : found.scale;
    room.second[room.sub] = found.minimum;
    room.third[room.sub] = importance ? weight_sum<SUB>(part) : 0.0f;
    __syncthreads();
    if (importance) {
        if (room.sub < 2) {
            float codes[SUBS], values[SUBS], weights[SUBS];
            const float *from = room.sub ? room.second : room.first;
            QK_UNROLL for (i32 s = 0; s < SUBS; ++s) {
                values[s] = from[s];
                weights[s] = room.third[s];
            }
            room.halves[room.sub] = qk_to_half(positive<SUBS>(values, weights, levels, codes));
            QK_UNROLL for (i32 s = 0; s < SUBS; ++s) (room.sub ? room.lows : room.scales)[s] = codes[s];
        }
        __syncthreads();
        scale = room.scales[room.sub];
        low = room.lows[room.sub];
    } else {
        scale = common_level<SUBS>(room.first, room.first[room.sub], levels, d);
        low = common_level<SUBS>(room.second, room.second[room.sub], levels, dmin);
        room.scales[room.sub] = scale;
        room.lows[room.sub] = low;
        if (room.sub == 0) {
            room.halves[0] = qk_to_half(d);
            room.halves[1] = qk_to_half(dmin);
        }
        __syncthreads();
    }
    float step = qk_from_half(room.halves[0]) * scale, offset = qk_from_half(room.halves[1]) * low;
    QK_UNROLL for (i32 j = 0; j < SUB; ++j) {
        float code = step == 0.0f ? (found.flat ? 0.0f : qk_nearest(found.step * (part.x[j] - found.base))) : qk_nearest((part.x[j] + offset) / step);
        room.codes[room.sub * SUB + j] = (u8)qk_clamp(code, 0.0f, (float)high);
    }
    store<SUB, BITS>(room, out);
}

QK_KERNEL QK_BLOCK(THREADS) q2_k(const float *source, const float *importance, u8 *out, i64 count, i32 per_row) {
    QK_ROOM(16)
    Span span = {-0.5f, 0.1f, 15, true};
    minimum<16, 2>(room, source, importance, out, per_row, 15, span, 1.0f);
}

QK_KERNEL QK_BLOCK(THREADS) q4_k(const float *source, const float *importance, u8 *out, i64 count, i32 per_row) {
    QK_ROOM(32)
    Span span = {-1.0f, 0.1f, 20, false};
    minimum<32, 4>(room, source, importance, out, per_row, 63, span, 2.0f);
}

QK_KERNEL QK_BLOCK(THREADS) q5_k(const float *source, const float *importance, u8 *out, i64 count, i32 per_row) {
    QK_ROOM(32)
    Span span = {-0.5f, 0.1f, 15, false};
    minimum<32, 5>(room, source, importance, out, per_row, 63, span, 2.0f);
}

QK_KERNEL QK_BLOCK(THREADS) q3_k(const float *source, const float *importance, u8 *out, i64 count, i32 per_row) {
    QK_ROOM(16)
    Part<16> part;
    load<16>(part, room, source, importance, per_row);
    float level[16], along, energy;
    if (importance) {
        weigh<16>(part, room, 2.0f);
        Signed found = symmetric<16>(part.x, part.w, 4);
        QK_UNROLL for (i32 j = 0; j < 16; ++j) level[j] = found.step == 0.0f ? -4.0f : level_of(found.step, part.x[j], 4);
        room.first[room.sub] = found.scale;
        room.second[room.sub] = weight_sum<16>(part);
        __syncthreads();
        if (room.sub == 0) {
            float values[16], weights[16];
            QK_UNROLL for (i32 s = 0; s < 16; ++s) {
                values[s] = room.first[s];
                weights[s] = room.second[s];
            }
            Signed common = symmetric<16>(values, weights, 32);
            room.halves[0] = qk_to_half(common.scale);
            QK_UNROLL for (i32 s = 0; s < 16; ++s) room.scales[s] = common.step == 0.0f ? 0.0f : level_of(common.step, values[s], 32) + 32.0f;
        }
    } else {
        float extreme = signed_absmax<16>(part.x), scale = 0.0f;
        bool dead = qk_abs(extreme) < EPSILON;
        float step = -4.0f / (dead ? 1.0f : extreme);
        QK_UNROLL for (i32 j = 0; j < 16; ++j) {
            part.w[j] = part.x[j] * part.x[j];
            level[j] = level_of(step, part.x[j], 4);
        }
        move<16>(level, part.x, part.w, -4.0f, 3.0f, -QK_INFINITY, along, energy);
        if (!dead && energy > 0.0f) scale = qk_divide(along, energy);
        QK_UNROLL for (i32 j = 0; j < 16; ++j) level[j] = dead ? -4.0f : level[j];
        room.first[room.sub] = scale;
        __syncthreads();
        float most = signed_absmax<16>(room.first);
        float grid = qk_divide(-32.0f, most);
        room.scales[room.sub] = most == 0.0f ? 0.0f : qk_clamp(qk_nearest(grid * scale), -32.0f, 31.0f) + 32.0f;
        if (room.sub == 0) room.halves[0] = qk_to_half(qk_divide(1.0f, grid));
    }
    __syncthreads();
    float step = qk_from_half(room.halves[0]) * (room.scales[room.sub] - 32.0f);
    QK_UNROLL for (i32 j = 0; j < 16; ++j) {
        float code = step == 0.0f ? level[j] : qk_clamp(qk_nearest(part.x[j] / step), -4.0f, 3.0f);
        room.codes[room.sub * 16 + j] = (u8)(code + 4.0f);
    }
    store<16, 3>(room, out);
}

QK_KERNEL QK_BLOCK(THREADS) q6_k(const float *source, const float *importance, u8 *out, i64 count, i32 per_row) {
    QK_ROOM(16)
    Part<16> part;
    load<16>(part, room, source, importance, per_row);
    if (!importance) {
        QK_UNROLL for (i32 j = 0; j < 16; ++j) part.w[j] = part.x[j] * part.x[j];
    }
    Signed found = symmetric<16>(part.x, part.w, 32);
    room.first[room.sub] = found.scale;
    __syncthreads();
    float extreme = signed_absmax<16>(room.first);
    bool dead = qk_abs(extreme) < EPSILON;
    float step = -128.0f / (dead ? 1.0f : extreme), stored = dead ? 0.0f : qk_min(qk_nearest(step * found.scale), 127.0f);
    u16 half = qk_to_half(dead ? 0.0f : 1.0f / step);
    room.scales[room.sub] = stored;
    if (room.sub == 0) room.halves[0] = half;
    float grid = qk_from_half(half) * stored;
    QK_UNROLL for (i32 j = 0; j < 16; ++j) {
        float code = found.step == 0.0f ? -32.0f : level_of(found.step, part.x[j], 32);
        if (grid != 0.0f) code = qk_clamp(qk_nearest(part.x[j] / grid), -32.0f, 31.0f);
        room.codes[room.sub * 16 + j] = dead ? (u8)0 : (u8)(code + 32.0f);
    }
    store<16, 6>(room, out);
}

QK_KERNEL QK_BLOCK(THREADS) q8_0(const float *source, const float *, u8 *out, i64 count, i32) {
    i64 block = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (block >= count) return;
    float top = 0.0f;
    for (i32 j = 0; j < 32; ++j) top = qk_max(top, qk_abs(source[block * 32 + j]));
    float scale = top / 127.0f, inverse = qk_divide(1.0f, scale);
    u16 half = qk_to_half(scale);
    out[block * 34] = byte_of(half, 0);
    out[block * 34 + 1] = byte_of(half, 1);
    for (i32 j = 0; j < 32; ++j) {
        float scaled = source[block * 32 + j] * inverse, whole = (float)(i32)scaled;
        float rest = qk_abs(scaled - whole) >= 0.5f ? (scaled < 0.0f ? -1.0f : 1.0f) : 0.0f;
        out[block * 34 + 2 + j] = (u8)(i8)(i32)(whole + rest);
    }
}
