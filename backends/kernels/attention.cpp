// Attention by AVX-512. Other processors leave it to llama.cpp.
#include "attention.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include <immintrin.h>

namespace edgespec {
namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;
constexpr float kNone = -INFINITY;

// What the stages of a pass hand on.
struct Pass {
    int64_t rows;    // of each group: tokens x heads that share a cache
    float* scores;   // [kv_heads][rows][cells]: scores, then weights
    float* inverse;  // [kv_heads][rows]: one over the sum of weights
    uint8_t* live;   // [cells / 16]: whether any token sees any cell of the block

    Pass(const Attention& a, void* memory)
        : rows(a.tokens * a.group()),
          scores(static_cast<float*>(memory)),
          inverse(scores + a.kv_heads * rows * a.cells),
          live(reinterpret_cast<uint8_t*>(inverse + a.kv_heads * rows)) {}

    float* row(const Attention& a, int64_t kv_head, int64_t r) const { return scores + (kv_head * rows + r) * a.cells; }
};

INLINE __m512 halves(const void* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }

INLINE __m512 bf16(const void* at) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// Lane i of the result is the sum of all lanes of x[i].
INLINE __m512 sums(const __m512* x) {
    __m512 pairs[8], quads[4];
    for (int i = 0; i < 8; i++) {
        __m512 a = x[2 * i], b = x[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    // Each quarter of quads[i] now holds partial sums of x[4 i] to x[4 i + 3].
    __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
    __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88), _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// e^x for x <= 0, to 2 units in the last place; 0 below -87.
INLINE __m512 exponential(__m512 x) {
    __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(_mm512_knot(tiny), p, n);
}

const uint16_t* mask_of(const Attention& a, int64_t token, int64_t cell) { return a.mask + token * a.mask_token + cell; }

// Cells of a block that a token sees. Anything but minus infinity is 0 (see computes_attention's caller).
INLINE __mmask16 seen(const Attention& a, int64_t token, int64_t cell) {
    __m256i mask = _mm256_loadu_si256((const __m256i*)mask_of(a, token, cell));
    return _mm256_cmpneq_epi16_mask(mask, _mm256_set1_epi16(int16_t(0xfc00)));
}

bool is_live(const Attention& a, int64_t cell) {
    for (int64_t t = 0; t < a.tokens; t++)
        if (seen(a, t, cell)) return true;
    return false;
}

void read_keys(const Attention& a, int64_t kv_head, int64_t cell, float* keys) {
    for (int c = 0; c < kLanes; c++) {
        const char* key = a.k + (cell + c) * a.k_cell + kv_head * a.k_head;
        for (int64_t d = 0; d < a.dk; d += kLanes)
            _mm512_store_ps(keys + c * a.dk + d, a.k_is_bf16 ? bf16(key + 2 * d) : halves(key + 2 * d));
    }
}

void score_block(const Attention& a, const Pass& pass, int64_t kv_head, int64_t cell) {
    alignas(64) float keys[kLanes * kMostHeadSize];
    read_keys(a, kv_head, cell, keys);
    for (int64_t r = 0; r < pass.rows; r++) {
        int64_t token = r / a.group(), head = kv_head * a.group() + r % a.group();
        const float* q = a.q + token * a.q_token + head * a.q_head;
        __m512 products[kLanes];
        for (int c = 0; c < kLanes; c++) products[c] = _mm512_setzero_ps();
        for (int64_t d = 0; d < a.dk; d += kLanes) {
            __m512 part = _mm512_loadu_ps(q + d);
            for (int c = 0; c < kLanes; c++)
                products[c] = _mm512_fmadd_ps(part, _mm512_load_ps(keys + c * a.dk + d), products[c]);
        }
        __m512 score = _mm512_mul_ps(sums(products), _mm512_set1_ps(a.scale));
        score = _mm512_mask_mov_ps(_mm512_set1_ps(kNone), seen(a, token, cell), score);
        _mm512_storeu_ps(pass.row(a, kv_head, r) + cell, score);
    }
}

// One row of scores: its weights e^(score - largest), and their sum in units of 2^-30, which is exact.
void weigh_row(const Attention& a, const Pass& pass, int64_t kv_head, int64_t r) {
    float* row = pass.row(a, kv_head, r);
    __m512 largest = _mm512_set1_ps(kNone);
    for (int64_t c = 0; c < a.cells; c += kLanes)
        if (pass.live[c / kLanes]) largest = _mm512_max_ps(largest, _mm512_loadu_ps(row + c));
    float most = _mm512_reduce_max_ps(largest);
    const float* sink = a.sinks ? a.sinks + kv_head * a.group() + r % a.group() : nullptr;
    if (sink) most = std::max(most, *sink);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t c = 0; c < a.cells; c += kLanes) {
        if (!pass.live[c / kLanes]) continue;
        __m512 score = _mm512_loadu_ps(row + c);
        __mmask16 is_seen = _mm512_cmp_ps_mask(score, _mm512_set1_ps(kNone), _CMP_NEQ_UQ);
        __m512 weight = _mm512_maskz_mov_ps(is_seen, exponential(_mm512_sub_ps(score, _mm512_set1_ps(most))));
        _mm512_storeu_ps(row + c, weight);
        __m512i units = _mm512_cvtps_epi32(_mm512_mul_ps(weight, _mm512_set1_ps(1 << 30)));
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(units)));
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(units, 1)));
    }
    float total = float(double(_mm512_reduce_add_epi64(sum)) / (1 << 30));
    if (sink) total += std::exp(*sink - most);
    pass.inverse[kv_head * pass.rows + r] = total > 0 ? 1 / total : 0;
}

constexpr int kSlice = 2 * kLanes;  // of a head's values
constexpr int kRowTile = 12;

// Weighted values of `Rows` rows, for one slice.
template <int Rows>
void add_values(const Attention& a, const Pass& pass, int64_t kv_head, int64_t slice, int64_t first) {
    __m512 low[Rows], high[Rows];
    const float* weights[Rows];
    for (int r = 0; r < Rows; r++) {
        low[r] = high[r] = _mm512_setzero_ps();
        weights[r] = pass.row(a, kv_head, first + r);
    }
    const char* values = a.v + kv_head * a.v_head + slice * kSlice * 2;
    for (int64_t block = 0; block < a.cells / kLanes; block++) {
        if (!pass.live[block]) continue;
        for (int64_t c = block * kLanes; c < (block + 1) * kLanes; c++) {
            __m512 a0 = halves(values + c * a.v_cell), a1 = halves(values + c * a.v_cell + 2 * kLanes);
            for (int r = 0; r < Rows; r++) {
                __m512 weight = _mm512_set1_ps(weights[r][c]);
                low[r] = _mm512_fmadd_ps(weight, a0, low[r]);
                high[r] = _mm512_fmadd_ps(weight, a1, high[r]);
            }
        }
    }
    for (int r = 0; r < Rows; r++) {
        int64_t token = (first + r) / a.group(), head = kv_head * a.group() + (first + r) % a.group();
        float* out = a.out + token * a.out_token + head * a.out_head + slice * kSlice;
        __m512 inverse = _mm512_set1_ps(pass.inverse[kv_head * pass.rows + first + r]);
        _mm512_storeu_ps(out, _mm512_mul_ps(low[r], inverse));
        _mm512_storeu_ps(out + kLanes, _mm512_mul_ps(high[r], inverse));
    }
}

using AddValues = void (*)(const Attention&, const Pass&, int64_t, int64_t, int64_t);
constexpr AddValues kAddValues[kRowTile] = {add_values<1>, add_values<2>, add_values<3>,  add_values<4>,
                                            add_values<5>, add_values<6>, add_values<7>,  add_values<8>,
                                            add_values<9>, add_values<10>, add_values<11>, add_values<12>};

// Calls `work(i)` for this thread's share of n units of work.
template <class Work>
void share(int64_t n, int64_t index, int64_t count, Work work) {
    for (int64_t i = n * index / count; i < n * (index + 1) / count; i++) work(i);
}

}  // namespace

void attention_scores(const Attention& a, void* memory, int64_t index, int64_t count) {
    Pass pass(a, memory);
    int64_t blocks = a.cells / kLanes;
    share(a.kv_heads * blocks, index, count, [&](int64_t i) {
        int64_t kv_head = i / blocks, block = i % blocks;
        bool live = is_live(a, block * kLanes);
        if (kv_head == 0) pass.live[block] = live;
        if (live) score_block(a, pass, kv_head, block * kLanes);
    });
}

void attention_weights(const Attention& a, void* memory, int64_t index, int64_t count) {
    Pass pass(a, memory);
    share(a.kv_heads * pass.rows, index, count, [&](int64_t i) { weigh_row(a, pass, i / pass.rows, i % pass.rows); });
}

void attention_values(const Attention& a, void* memory, int64_t index, int64_t count) {
    Pass pass(a, memory);
    int64_t slices = a.dv / kSlice, tiles = (pass.rows + kRowTile - 1) / kRowTile;
    share(a.kv_heads * slices * tiles, index, count, [&](int64_t i) {
        int64_t tile = i % tiles, first = pass.rows * tile / tiles, end = pass.rows * (tile + 1) / tiles;
        kAddValues[end - first - 1](a, pass, i / tiles / slices, i / tiles % slices, first);
    });
}

}  // namespace edgespec
#pragma GCC pop_options

namespace edgespec {

static bool runs_here() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
}

}  // namespace edgespec
#else
namespace edgespec {

static bool runs_here() { return false; }

void attention_scores(const Attention&, void*, int64_t, int64_t) {}
void attention_weights(const Attention&, void*, int64_t, int64_t) {}
void attention_values(const Attention&, void*, int64_t, int64_t) {}

}  // namespace edgespec
#endif

namespace edgespec {

bool computes_attention(int64_t dk, int64_t dv, int64_t cells) {
    static const bool has_instructions = runs_here();
    return has_instructions && dk % 16 == 0 && dv % 32 == 0 && dk <= kMostHeadSize && cells % kCellBlock == 0;
}

size_t attention_bytes(int64_t tokens, int64_t heads, int64_t cells) {
    int64_t rows = (tokens < kAttentionTokens ? tokens : kAttentionTokens) * heads;
    return size_t(rows * (cells + 1)) * sizeof(float) + size_t(cells / kCellBlock) + 64;
}

}  // namespace edgespec
