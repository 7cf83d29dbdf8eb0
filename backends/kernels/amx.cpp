// Products by AMX: up to 16 columns of one group are one instruction. The integer sums and the float
// operations are those of AVX-512, and a few columns are left to it.
#if (defined(__x86_64__) || defined(_M_X64)) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "compiler.h"
#include "tables.h"

// GCC 12 warns of its own header's undefined vectors (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,amx-tile,amx-int8")
namespace edgespec {
namespace {

#include "avx512.h"

#include "tile.h"

constexpr int kFewest = 13;
constexpr int kWidest = 16;
constexpr int kChunk = 16;
constexpr int64_t kMostColumns = 128;

// The groups of one panel whose weights are unpacked at a time: small enough for the first cache.
struct alignas(64) Chunk {
    int8_t weights[kChunk][8][64];
    float scales[kChunk][16], minimums[kChunk][2][16], small[kChunk][2][16];
};

// Tile registers: 0 sums, 1 activations, 2 weights; 3, 4 and 5 those of a second half. Written as numbers,
// for GCC's intrinsics make names of them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, unused[15] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// GCC's intrinsics do not say which memory they read.
INLINE void written(const void* at) { asm volatile("" : : "r"(at) : "memory"); }

void set_tiles(int columns, int quads) {
    TileShapes shapes;
    for (int half = 0; half < 2; half++) {
        const int rows[3] = {columns, columns, quads}, row_bytes[3] = {64, 4 * quads, 64};
        for (int i = 0; i < 3; i++) {
            shapes.rows[3 * half + i] = uint8_t(rows[i]);
            shapes.row_bytes[3 * half + i] = uint16_t(row_bytes[i]);
        }
    }
    written(&shapes);
    _tile_loadconfig(&shapes);
}

template <class F, int I>
INLINE void unpack_quad(const uint8_t* group, int8_t (*to)[64]) {
    _mm512_store_si512(to[I], _mm512_sub_epi8(quad<Avx512, F, I>(group), _mm512_set1_epi8(char(F::traits.offset))));
}

template <class F, int... I>
INLINE void unpack_quads(const uint8_t* group, int8_t (*to)[64], std::integer_sequence<int, I...>) {
    (unpack_quad<F, I>(group, to), ...);
}

template <class F>
INLINE void unpack_group(const uint8_t* block, const uint8_t* group, Chunk& to, int i) {
    using V = Avx512;
    unpack_quads<F>(group, to.weights[i], std::make_integer_sequence<int, 8>());
    V::store(to.scales[i], scale_of<V, F>(block, group));
    for (int half = 0; half < (F::has_halves ? 2 : 1); half++) {
        if constexpr (F::traits.has_minimum) V::store(to.minimums[i][half], minimum_of<V, F>(block, group, half));
        if constexpr (F::has_halves) V::store(to.small[i][half], small_of<V, F>(group, half));
    }
}

template <class F>
void unpack(const uint8_t* panel, int64_t first, int count, Chunk& to) {
    for (int i = 0; i < count; i++) {
        const uint8_t* block = panel + (first + i) / F::groups * F::bytes;
        const uint8_t* group = block + F::header + (first + i) % F::groups * F::group_bytes;
        unpack_group<F>(block, group, to, i);
    }
    written(&to);
}

// Integer products of a group and the columns at x.
template <class F>
INLINE void multiply_group(const int8_t (*weights)[64], const ActivationBlock* x, int64_t stride, int32_t* to) {
    const long row = long(stride * int64_t(sizeof(ActivationBlock)));
    _tile_zero(0);
    _tile_loadd(1, x->values, row);
    _tile_loadd(2, weights, 64);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, to, 64);
    if constexpr (F::has_halves) {
        _tile_zero(3);
        _tile_loadd(4, x->values + 16, row);
        _tile_loadd(5, weights + 4, 64);
        _tile_dpbssd(3, 4, 5);
        _tile_stored(3, to + 16 * kWidest, 64);
    }
}

template <class F, int N>
INLINE void add_floats(const Chunk& chunk, int i, const int32_t* products, const ActivationBlock* x, int64_t stride,
                       __m512* sums) {
    using V = Avx512;
    __m512 scale = _mm512_load_ps(chunk.scales[i]);
    UNROLL for (int t = 0; t < N; t++, x += stride) {
        // The next column's address is an addition, not one of 16 that are kept and do not fit the registers.
        asm("" : "+r"(x));
        __m512 value = V::to_float(_mm512_load_si512(products + 16 * t));
        if constexpr (F::has_halves) {
            __m512 other = V::to_float(_mm512_load_si512(products + 16 * (kWidest + t)));
            value = V::add_product(other, _mm512_load_ps(chunk.small[i][1]), V::times(value, _mm512_load_ps(chunk.small[i][0])));
        }
        sums[t] = V::add_product(value, V::times(scale, V::all(x->scale)), sums[t]);
        if constexpr (F::traits.has_minimum)
            for (int half = 0; half < (F::has_halves ? 2 : 1); half++)
                sums[t] = V::add_product(_mm512_load_ps(chunk.minimums[i][half]), V::all(sum_of<F>(*x, half)), sums[t]);
    }
}

// Adds a chunk's products to the sums of N columns at x, and fetches the next chunk's weights. Tiles have
// `rows` columns: where these are more than N, the first ones are of the tile before and not used.
template <class F, int N>
void add_chunk(const Chunk& chunk, int count, int rows, const uint8_t* next, const ActivationBlock* x, int64_t stride,
               float* to) {
    alignas(64) int32_t products[2][2 * kWidest * 16];
    __m512 sums[N];
    const int skipped = rows - N;
    UNROLL for (int t = 0; t < N; t++) sums[t] = _mm512_loadu_ps(to + 16 * t);
    // The next group's tiles run beside the floats of this one.
    multiply_group<F>(chunk.weights[0], x - skipped * stride, stride, products[0]);
    for (int i = 0; i < count; i++, x++) {
        if (i + 1 < count) multiply_group<F>(chunk.weights[i + 1], x + 1 - skipped * stride, stride, products[(i + 1) % 2]);
        prefetch_group<F>(next + i * int64_t(F::bytes / F::groups));
        const int32_t* ready = products[i % 2] + 16 * skipped;
        asm("" : "+r"(ready));
        add_floats<F, N>(chunk, i, ready, x, stride, sums);
    }
    UNROLL for (int t = 0; t < N; t++) _mm512_storeu_ps(to + 16 * t, sums[t]);
}

template <class F, int... N>
INLINE void add_chunk_of(int64_t columns, std::integer_sequence<int, N...>, const Chunk& chunk, int count, int rows,
                         const uint8_t* next, const ActivationBlock* x, int64_t stride, float* to) {
    using Add = void (*)(const Chunk&, int, int, const uint8_t*, const ActivationBlock*, int64_t, float*);
    static constexpr Add adds[] = {add_chunk<F, N + 1>...};
    adds[columns - 1](chunk, count, rows, next, x, stride, to);
}

// One panel and n columns, in even tiles: 17 columns are 9 and 8.
template <class F>
void panel_product(const uint8_t* panel, int64_t groups, Activations x, int64_t n, float* out, int64_t out_stride) {
    alignas(64) float sums[kMostColumns][16];
    Chunk chunk;
    const int64_t tiles = (n + kWidest - 1) / kWidest, rows = (n + tiles - 1) / tiles;
    memset(sums, 0, size_t(n) * sizeof(sums[0]));
    for (int64_t g = 0; g < groups; g += kChunk) {
        int count = int(groups - g < kChunk ? groups - g : kChunk);
        unpack<F>(panel, g, count, chunk);
        for (int64_t tile = 0, t = 0; tile < tiles; tile++) {
            int64_t size = (n - t + tiles - tile - 1) / (tiles - tile);
            add_chunk_of<F>(size, std::make_integer_sequence<int, kWidest>(), chunk, count, int(rows),
                            panel + (g + kChunk) / F::groups * F::bytes, x.blocks + t * x.stride + g, x.stride, sums[t]);
            t += size;
        }
    }
    for (int64_t t = 0; t < n; t++) memcpy(out + t * out_stride, sums[t], sizeof(sums[t]));
}

template <class F>
const Format& few_columns() {
    for (const Format& format : kAvx512Vnni.formats)
        if (format.type == F::traits.type) return format;
    __builtin_unreachable();
}

template <class F>
struct Multiply {
    static void run(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n,
                    float* out, int64_t out_stride) {
        if (n < kFewest) return few_columns<F>().multiply(panels, first, end, k, x, n, out, out_stride);
        int64_t passes = (n + kMostColumns - 1) / kMostColumns, blocks = k / F::columns;
        for (int64_t pass = 0, t = 0; pass < passes; pass++) {
            int64_t size = (n - t + passes - pass - 1) / (passes - pass), tiles = (size + kWidest - 1) / kWidest;
            set_tiles(int((size + tiles - 1) / tiles), F::has_halves ? 4 : 8);
            for (int64_t p = first; p < end; p++)
                panel_product<F>(panels + p * blocks * F::bytes, k / 32, {x.blocks + t * x.stride, x.stride}, size,
                                 out + t * out_stride + p * kRows, out_stride);
            t += size;
        }
        _tile_release();
    }
};

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

// Linux hands out the tile registers to a process that asks once.
static bool permitted() {
    constexpr long request = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

static bool runs_here() {
    static const bool runs = kAvx512Vnni.runs_here() && has_amx() && permitted();
    return runs;
}

const InstructionSet kAmx =
    table<Multiply>("amx_int8", runs_here, quantize_avx2, &kAttentionAvx512, kFloatsAvx512);

}  // namespace edgespec
#endif
