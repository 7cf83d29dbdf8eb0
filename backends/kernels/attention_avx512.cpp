// Attention and products of floats by AVX-512: 16 floats are one vector.
#if defined(__x86_64__)
#include <immintrin.h>

#include "compiler.h"
#include "tables.h"

// GCC 12 warns of its own header's undefined vectors (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace edgespec {
namespace {

struct V {
    using Float = __m512;
    using Total = __m512i;
    static constexpr int lanes = 16;
    static constexpr int most_rows = 12;

    static INLINE Float load(const float* at) { return _mm512_loadu_ps(at); }
    static INLINE void store(float* at, Float x) { _mm512_storeu_ps(at, x); }
    static INLINE Float all(float x) { return _mm512_set1_ps(x); }
    static INLINE Float plus(Float a, Float b) { return _mm512_add_ps(a, b); }
    static INLINE Float minus(Float a, Float b) { return _mm512_sub_ps(a, b); }
    static INLINE Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static INLINE Float divide(Float a, Float b) { return _mm512_div_ps(a, b); }
    static INLINE Float add_product(Float a, Float b, Float sum) { return _mm512_fmadd_ps(a, b, sum); }
    static INLINE Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
    static INLINE float largest(Float x) { return _mm512_reduce_max_ps(x); }
    static INLINE Float size(Float x) { return _mm512_abs_ps(x); }
    static INLINE Float with_sign(Float x, Float sign) {
        return _mm512_or_ps(x, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
    }
    static INLINE Float round(Float x) { return _mm512_roundscale_ps(x, 0); }
    static INLINE Float times_power_of_2(Float x, Float n) { return _mm512_scalef_ps(x, n); }
    static INLINE Float zero_below(Float x, Float of, float least) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(of, all(least), _CMP_NLT_UQ), x);
    }

    // Of 8 / width results of each of two vectors: the halves of their 2 x width partial sums, added.
    template <int width>
    static INLINE Float fold(Float a, Float b) {
        if constexpr (width == 8) return plus(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        if constexpr (width == 4) return plus(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        if constexpr (width == 1) return plus(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
        const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return plus(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }

    static INLINE float half(const void* at) {
        uint16_t bits;
        memcpy(&bits, at, sizeof bits);
        return _cvtsh_ss(bits);
    }
    static INLINE Float halves(const void* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
    static INLINE Float bf16(const void* at) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static INLINE Float signed_bytes(const int8_t* at) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
    }

    // A sum of integers: what floats round to.
    static INLINE Total none() { return _mm512_setzero_si512(); }
    static INLINE Total add_rounded(Total sum, Float x) {
        __m512i units = _mm512_cvtps_epi32(x);
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(units)));
        return _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(units, 1)));
    }
    static INLINE int64_t integer(Total sum) { return _mm512_reduce_add_epi64(sum); }

    // In four steps, each of which swaps halves of twice the size.
    static INLINE void transpose(const float* from, int64_t from_stride, float* to, int64_t stride) {
        __m512 x[16], y[16];
        for (int i = 0; i < 16; i++) x[i] = load(from + i * from_stride);
        UNROLL for (int i = 0; i < 16; i += 2) {
            y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
            y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
        }
        UNROLL for (int i = 0; i < 16; i += 4) {
            for (int j = 0; j < 2; j++) {
                __m512d a = _mm512_castps_pd(y[i + j]), b = _mm512_castps_pd(y[i + j + 2]);
                x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
        }
        // Quarter q of x[4 i + j] is now column 4 q + j of rows 4 i to 4 i + 3.
        UNROLL for (int j = 0; j < 4; j++) {
            const __m512 a = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88);
            const __m512 c = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd), d = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
            store(to + j * stride, _mm512_shuffle_f32x4(a, b, 0x88));
            store(to + (4 + j) * stride, _mm512_shuffle_f32x4(c, d, 0x88));
            store(to + (8 + j) * stride, _mm512_shuffle_f32x4(a, b, 0xdd));
            store(to + (12 + j) * stride, _mm512_shuffle_f32x4(c, d, 0xdd));
        }
    }
};

#include "attention_stages.h"

#include "float_products.h"

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

const AttentionStages kAttentionAvx512 = {scores, weights, values};
const FloatProducts kFloatsAvx512 = kProducts;

}  // namespace edgespec
#endif
