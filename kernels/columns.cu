// GPTQ's column loop over one span, and rounding on searched grids: a warp for each row, the row in registers.
//
// Twins of quantkit.methods.gptq.columns_reference and quantkit.methods._rounding.round_reference: the same float operations in the
// same order, so the same codes. Lane l holds columns l, l + 32, l + 64, l + 96 of a span of at most 128.
//
// Candidate grids of a group are spread over the lanes, two each; each lane sums its own errors over the columns in order. The
// `kept` least by that sum (the first of equals) are tried by the exact loss, the warp working on one at a time.
//
// gptq_columns  weight f32 [rows, n], factor f32 [n, n] (upper triangle), importance f32 [n], scale, zero f32 [rows, n / group] (read when
//               count is 0), codes u8 [rows, n], errors f32 [rows, n]. The factor's triangle lies packed in shared memory (33 KB).
//               Bytes moved: 13 rows n, and 4 n^2 a block of 8 rows from the second-level cache. Operations: rows n^2 for the loop, 7 rows n
//               count for the candidates, kept rows n group for the losses: the floor is arithmetic, not memory.
// round_affine  weight f32 [rows, columns], energy f32 [columns], tiles f32 [columns / group, group, group] or none (kept 1), codes u8 [rows,
//               columns], scale, zero f32 [rows, columns / group]. Bytes moved: 5 rows columns; operations as above with group for n.
#include "quantkit.cuh"

#define SPAN 128
#define SLOTS 4 // columns of a lane
#define WARPS 8
#define THREADS 256
#define TRIES 2 // candidates of a lane

struct Grids {
    const float *shrinks, *zeros;
    i32 count, kept, middle, high, mantissa;
    float least, most;
};

struct Grid {
    float scale, zero;
};

// The place of factor[c][j], j >= c, in the packed triangle of n columns.
QK_DEVICE i32 corner(i32 c, i32 j, i32 n) { return c * (2 * n - c - 1) / 2 + j; }

QK_DEVICE float round_scale(float scale, const Grids &grids) {
    float size = qk_min(qk_max(qk_abs(scale), grids.least), grids.most);
    u32 bits = qk_bits(scale < 0.0f ? -size : size);
    if (grids.mantissa < 23) {
        i32 drop = 23 - grids.mantissa;
        bits = ((bits + (1u << (drop - 1)) - 1u + ((bits >> drop) & 1u)) >> drop) << drop;
    }
    return qk_float(bits);
}

QK_DEVICE float code_of(float value, float inverse, float zero, float top) { return qk_min(qk_max(qk_round(value * inverse) + zero, 0.0f), top); }

QK_DEVICE float warp_min(float value) {
    for (i32 step = 16; step; step >>= 1) value = qk_min(value, QK_SHUFFLE_XOR(value, step));
    return value;
}

// The grid of candidate k for a group whose values, zero included, reach from low to top.
QK_DEVICE Grid candidate(i32 k, float low, float top, const Grids &grids) {
    float high = (float)grids.high;
    Grid found;
    found.scale = round_scale((top * grids.shrinks[k] - low * grids.shrinks[k]) / high, grids);
    found.zero = (float)grids.middle;
    if (!grids.middle) {
        float base = high / 2.0f - (low + top) / 2.0f / found.scale;
        found.zero = qk_min(qk_max(qk_round(base) + grids.zeros[k], 0.0f), high);
    }
    return found;
}

// Loss of the column loop inside one group: part (shared) holds its values, triangle the span's factor, a its first column.
struct Simulated {
    const float *triangle;
    i32 n, a;
    QK_INLINE float operator()(const float *part, i32 group, Grid grid, float top, i32 lane) const {
        float work[SLOTS], inverse = 1.0f / grid.scale, loss = 0.0f;
        QK_UNROLL for (i32 s = 0; s < SLOTS; ++s) work[s] = 32 * s + lane < group ? part[32 * s + lane] : 0.0f;
        QK_UNROLL for (i32 s = 0; s < SLOTS; ++s) {
            QK_ROLLED for (i32 l = 0; l < 32 && 32 * s + l < group; ++l) {
                i32 c = 32 * s + l;
                float value = QK_SHUFFLE(work[s], l);
                float code = code_of(value, inverse, grid.zero, top);
                float step = (value - grid.scale * (code - grid.zero)) / triangle[corner(a + c, a + c, n)];
                loss = loss + step * step;
                QK_UNROLL for (i32 t = s; t < SLOTS; ++t) {
                    i32 j = 32 * t + lane;
                    if (j > c && j < group) work[t] = work[t] - step * triangle[corner(a + c, a + j, n)];
                }
            }
        }
        return loss;
    }
};

// e H eT of rounding one group: tile f32 [group, group].
struct Weighed {
    const float *tile;
    QK_INLINE float operator()(const float *part, i32 group, Grid grid, float top, i32 lane) const {
        float mixed[SLOTS], inverse = 1.0f / grid.scale, total = 0.0f;
        QK_UNROLL for (i32 s = 0; s < SLOTS; ++s) mixed[s] = 0.0f;
        QK_UNROLL for (i32 s = 0; s < SLOTS; ++s) {
            QK_ROLLED for (i32 l = 0; l < 32 && 32 * s + l < group; ++l) {
                i32 c = 32 * s + l;
                float value = part[c], code = code_of(value, inverse, grid.zero, top);
                float error = grid.scale * (code - grid.zero) - value;
                total = total + error * (tile[c * group + c] * error + 2.0f * QK_SHUFFLE(mixed[s], l));
                QK_UNROLL for (i32 t = s; t < SLOTS; ++t) {
                    i32 j = 32 * t + lane;
                    if (j > c && j < group) mixed[t] = mixed[t] + error * tile[c * group + j];
                }
            }
        }
        return total;
    }
};

// The best grid of a group, the same in every lane. part: shared, the group's values; importance: its columns'.
template <typename Exact>
QK_DEVICE Grid choose(const float *part, i32 group, const float *importance, const Grids &grids, const Exact &exact, i32 lane) {
    float low = 0.0f, top = 0.0f, limit = (float)grids.high;
    for (i32 j = lane; j < group; j += 32) {
        low = qk_min(low, part[j]);
        top = qk_max(top, part[j]);
    }
    low = warp_min(low);
    top = -warp_min(-top);
    if (grids.middle) {
        top = qk_max(-low, top);
        low = -top;
    }
    Grid mine[TRIES];
    float error[TRIES];
    QK_UNROLL for (i32 s = 0; s < TRIES; ++s) {
        i32 k = 32 * s + lane;
        error[s] = QK_INFINITY;
        mine[s].scale = 1.0f;
        mine[s].zero = 0.0f;
        if (k >= grids.count) continue;
        mine[s] = candidate(k, low, top, grids);
        float inverse = 1.0f / mine[s].scale, sum = 0.0f;
        for (i32 j = 0; j < group; ++j) {
            float rest = mine[s].scale * (code_of(part[j], inverse, mine[s].zero, limit) - mine[s].zero) - part[j];
            sum = sum + importance[j] * (rest * rest);
        }
        error[s] = sum;
    }
    Grid best = {1.0f, 0.0f};
    float least = QK_INFINITY;
    QK_ROLLED for (i32 round = 0; round < grids.kept; ++round) {
        i32 slot = error[1] < error[0] ? 1 : 0;
        float value = slot ? error[1] : error[0];
        i32 index = 32 * slot + lane;
        for (i32 step = 16; step; step >>= 1) {
            float other = QK_SHUFFLE_XOR(value, step);
            i32 place = QK_SHUFFLE_XOR(index, step);
            if (other < value || (other == value && place < index)) {
                value = other;
                index = place;
            }
        }
        Grid found;
        found.scale = QK_SHUFFLE(index < 32 ? mine[0].scale : mine[1].scale, index & 31);
        found.zero = QK_SHUFFLE(index < 32 ? mine[0].zero : mine[1].zero, index & 31);
        QK_UNROLL for (i32 s = 0; s < TRIES; ++s)
            if (32 * s + lane == index) error[s] = QK_INFINITY;
        if (grids.kept == 1) return found;
        float loss = exact(part, group, found, limit, lane);
        if (loss < least) {
            least = loss;
            best = found;
        }
    }
    return best;
}

QK_KERNEL QK_BLOCK(THREADS)
gptq_columns(const float *weight, const float *factor, const float *importance, float *scale, float *zero, u8 *codes, float *errors,
             const float *shrinks, const float *zeros, i32 rows, i32 n, i32 group, i32 count, i32 kept, i32 middle, i32 high, i32 mantissa,
             float least, float most) {
    QK_SHARED(float, triangle, SPAN * (SPAN + 1) / 2);
    QK_SHARED(float, parts, WARPS * SPAN);
    for (i32 at = (i32)threadIdx.x; at < n * n; at += THREADS) {
        i32 c = at / n, j = at % n;
        if (j >= c) triangle[corner(c, j, n)] = factor[at];
    }
    __syncthreads();
    i32 lane = (i32)threadIdx.x & 31, warp = (i32)threadIdx.x / 32, row = (i32)blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    Grids grids = {shrinks, zeros, count, kept, middle, high, mantissa, least, most};
    float *part = parts + warp * SPAN, top = (float)high, work[SLOTS], inverse = 1.0f;
    const float *from = weight + (i64)row * n;
    Grid grid = {1.0f, 0.0f};
    QK_UNROLL for (i32 s = 0; s < SLOTS; ++s) work[s] = 32 * s + lane < n ? from[32 * s + lane] : 0.0f;
    QK_UNROLL for (i32 s = 0; s < SLOTS; ++s) {
        QK_ROLLED for (i32 l = 0; l < 32 && 32 * s + l < n; ++l) {
            i32 c = 32 * s + l;
            if (c % group == 0) {
                i64 at = (i64)row * (n / group) + c / group;
                if (count) {
                    QK_UNROLL for (i32 t = 0; t < SLOTS; ++t) part[32 * t + lane] = work[t];
                    __syncwarp();
                    Simulated exact = {triangle, n, c};
                    grid = choose(part + c, group, importance + c, grids, exact, lane);
                    __syncwarp();
                    if (lane == 0) {
                        scale[at] = grid.scale;
                        zero[at] = grid.zero;
                    }
                } else {
                    grid.scale = scale[at];
                    grid.zero = zero[at];
                }
                inverse = 1.0f / grid.scale;
            }
            float value = QK_SHUFFLE(work[s], l), code = code_of(value, inverse, grid.zero, top);
            float error = (value - grid.scale * (code - grid.zero)) / triangle[corner(c, c, n)];
            if (lane == l) {
                codes[(i64)row * n + c] = (u8)code;
                errors[(i64)row * n + c] = error;
            }
            QK_UNROLL for (i32 t = s; t < SLOTS; ++t) {
                i32 j = 32 * t + lane;
                if (j > c && j < n) work[t] = work[t] - error * triangle[corner(c, j, n)];
            }
        }
    }
}

QK_KERNEL QK_BLOCK(THREADS)
round_affine(const float *weight, const float *energy, const float *tiles, float *scale, float *zero, u8 *codes, const float *shrinks,
             const float *zeros, i32 rows, i32 columns, i32 group, i32 count, i32 kept, i32 middle, i32 high, i32 mantissa, float least,
             float most) {
    QK_SHARED(float, parts, WARPS * SPAN);
    i32 lane = (i32)threadIdx.x & 31, warp = (i32)threadIdx.x / 32, row = (i32)blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    Grids grids = {shrinks, zeros, count, kept, middle, high, mantissa, least, most};
    float *part = parts + warp * SPAN, top = (float)high;
    for (i32 g = (i32)blockIdx.y; g < columns / group; g += (i32)gridDim.y) {
        i64 first = (i64)row * columns + g * group, at = (i64)row * (columns / group) + g;
        __syncwarp();
        for (i32 j = lane; j < group; j += 32) part[j] = weight[first + j];
        __syncwarp();
        Weighed exact = {tiles + (i64)g * group * group};
        Grid grid = choose(part, group, energy + g * group, grids, exact, lane);
        float inverse = 1.0f / grid.scale;
        for (i32 j = lane; j < group; j += 32) codes[first + j] = (u8)code_of(part[j], inverse, grid.zero, top);
        if (lane == 0) {
            scale[at] = grid.scale;
            zero[at] = grid.zero;
        }
    }
}
