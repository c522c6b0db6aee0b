// Fields of 2, 3, 4 or 8 bits in 32-bit words, and back: one kernel each for every layout that a container has.
//
// A stream runs along axis n of values [n, m]: field k of a column lies at bits k * bits.. of its words, little-endian, 3 bits
// crossing words. Strides say which way the values and the words lie, so a transposed weight, packed rows and packed columns are
// one pass. `order`, eight nibbles, names the value that each field of a run of eight holds (AWQ interleaves; 0x76543210 does not).
//
//   values   u8  [n, m]              strides in elements
//   words    u32 [n * bits / 32, m]  strides in words
//
// A block moves a tile of 64 x 32 values through shared memory, so that loads and stores run along whichever axis is contiguous.
// Bytes moved: n m (1 + bits / 8); operations: about 3 a value. Its floor is the copy bandwidth.
#include "quantkit.cuh"

#define TILE_N 64
#define TILE_M 32
#define ROOM 68 // bytes of a column in shared memory: no two lanes of a warp on one bank
#define THREADS 256

QK_DEVICE i32 source_of(i32 field, u32 order) { return (field & ~7) + (i32)((order >> (4 * (field & 7))) & 15u); }

QK_KERNEL QK_BLOCK(THREADS)
pack_fields(const u8 *values, i64 value_n, i64 value_m, u32 *words, i64 word_n, i64 word_m, i32 n, i32 m, i32 bits, u32 order) {
    QK_SHARED(u8, tile, TILE_M * ROOM);
    i32 first_n = (i32)blockIdx.x * TILE_N, first_m = (i32)blockIdx.y * TILE_M, thread = (i32)threadIdx.x;
    for (i32 at = thread; at < TILE_N * TILE_M; at += THREADS) {
        i32 i = value_n == 1 ? at % TILE_N : at / TILE_M, j = value_n == 1 ? at / TILE_N : at % TILE_M;
        bool inside = first_n + i < n && first_m + j < m;
        tile[j * ROOM + i] = inside ? values[(first_n + i) * value_n + (first_m + j) * value_m] : (u8)0;
    }
    __syncthreads();
    i32 each = TILE_N * bits / 32, first_word = first_n / 32 * bits, most = n / 32 * bits + n % 32 * bits / 32;
    u32 mask = (1u << bits) - 1u;
    for (i32 at = thread; at < each * TILE_M; at += THREADS) {
        i32 w = word_n == 1 ? at % each : at / TILE_M, j = word_n == 1 ? at / each : at % TILE_M;
        if (first_word + w >= most || first_m + j >= m) continue;
        u32 word = 0;
        for (i32 field = 32 * w / bits; field * bits < 32 * (w + 1); ++field) {
            u32 value = tile[j * ROOM + source_of(field, order)] & mask;
            i32 shift = field * bits - 32 * w;
            word |= shift >= 0 ? value << shift : value >> -shift;
        }
        words[(first_word + w) * word_n + (first_m + j) * word_m] = word;
    }
}

QK_KERNEL QK_BLOCK(THREADS)
unpack_fields(const u32 *words, i64 word_n, i64 word_m, u8 *values, i64 value_n, i64 value_m, i32 n, i32 m, i32 bits, u32 order) {
    QK_SHARED(u32, tile, TILE_M * (TILE_N * 8 / 32 + 1));
    i32 first_n = (i32)blockIdx.x * TILE_N, first_m = (i32)blockIdx.y * TILE_M, thread = (i32)threadIdx.x;
    i32 each = TILE_N * bits / 32, room = each + 1, first_word = first_n / 32 * bits, most = n / 32 * bits + n % 32 * bits / 32;
    for (i32 at = thread; at < each * TILE_M; at += THREADS) {
        i32 w = word_n == 1 ? at % each : at / TILE_M, j = word_n == 1 ? at / each : at % TILE_M;
        bool inside = first_word + w < most && first_m + j < m;
        tile[j * room + w] = inside ? words[(first_word + w) * word_n + (first_m + j) * word_m] : 0u;
    }
    __syncthreads();
    u32 mask = (1u << bits) - 1u;
    for (i32 at = thread; at < TILE_N * TILE_M; at += THREADS) {
        i32 field = value_n == 1 ? at % TILE_N : at / TILE_M, j = value_n == 1 ? at / TILE_N : at % TILE_M;
        i32 i = source_of(field, order), w = field * bits / 32, shift = field * bits % 32;
        if (first_n + i >= n || first_m + j >= m) continue;
        u32 value = tile[j * room + w] >> shift;
        if (shift + bits > 32) value |= tile[j * room + w + 1] << (32 - shift);
        values[(first_n + i) * value_n + (first_m + j) * value_m] = (u8)(value & mask);
    }
}
