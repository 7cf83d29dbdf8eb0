// Attention and products of floats by AVX2: 8 floats are one vector.
#if defined(__x86_64__)
#include <immintrin.h>

#include "compiler.h"
#include "tables.h"

BEGIN_TARGET("avx2,fma,f16c")
namespace edgespec {
namespace {

struct V {
    using Float = __m256;
    using Total = __m256i;
    static constexpr int lanes = 8;
    static constexpr int most_rows = 6;

    static INLINE Float load(const float* at) { return _mm256_loadu_ps(at); }
    static INLINE void store(float* at, Float x) { _mm256_storeu_ps(at, x); }
    static INLINE Float all(float x) { return _mm256_set1_ps(x); }
    static INLINE Float plus(Float a, Float b) { return _mm256_add_ps(a, b); }
    static INLINE Float minus(Float a, Float b) { return _mm256_sub_ps(a, b); }
    static INLINE Float times(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static INLINE Float divide(Float a, Float b) { return _mm256_div_ps(a, b); }
    static INLINE Float add_product(Float a, Float b, Float sum) { return _mm256_fmadd_ps(a, b, sum); }
    static INLINE Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
    static INLINE float largest(Float x) {
        float values[lanes];
        store(values, x);
        return *std::max_element(values, values + lanes);
    }
    static INLINE Float size(Float x) { return _mm256_andnot_ps(all(-0.0f), x); }
    static INLINE Float with_sign(Float x, Float sign) { return _mm256_or_ps(x, _mm256_and_ps(sign, all(-0.0f))); }
    static INLINE Float round(Float x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static INLINE Float times_power_of_2(Float x, Float n) {
        __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
        return times(x, _mm256_castsi256_ps(exponent));
    }
    static INLINE Float zero_below(Float x, Float of, float least) {
        return _mm256_and_ps(x, _mm256_cmp_ps(of, all(least), _CMP_NLT_UQ));
    }

    // Of 4 / width results of each of two vectors: the halves of their 2 x width partial sums, added.
    template <int width>
    static INLINE Float fold(Float a, Float b) {
        if constexpr (width == 4) return plus(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
        if constexpr (width == 2) return plus(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
        return plus(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
    }

    static INLINE float half(const void* at) {
        uint16_t bits;
        memcpy(&bits, at, sizeof bits);
        return _cvtsh_ss(bits);
    }
    static INLINE __m128i eight_words(const void* at) { return _mm_loadu_si128((const __m128i*)at); }
    static INLINE Float halves(const void* at) { return _mm256_cvtph_ps(eight_words(at)); }
    static INLINE Float bf16(const void* at) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight_words(at)), 16));
    }
    static INLINE Float signed_bytes(const int8_t* at) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
    }

    // A sum of integers: what floats round to.
    static INLINE Total none() { return _mm256_setzero_si256(); }
    static INLINE Total add_rounded(Total sum, Float x) {
        __m256i units = _mm256_cvtps_epi32(x);
        sum = _mm256_add_epi64(sum, _mm256_cvtepi32_epi64(_mm256_castsi256_si128(units)));
        return _mm256_add_epi64(sum, _mm256_cvtepi32_epi64(_mm256_extracti128_si256(units, 1)));
    }
    static INLINE int64_t integer(Total sum) {
        int64_t values[4];
        _mm256_storeu_si256((__m256i*)values, sum);
        return values[0] + values[1] + values[2] + values[3];
    }

    // In three steps, each of which swaps halves of twice the size.
    static INLINE void transpose(const float* from, int64_t from_stride, float* to, int64_t stride) {
        __m256 x[8], y[8];
        for (int i = 0; i < 8; i++) x[i] = load(from + i * from_stride);
        UNROLL for (int i = 0; i < 8; i += 2) {
            y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
            y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
        }
        UNROLL for (int i = 0; i < 8; i += 4) {
            for (int j = 0; j < 2; j++) {
                x[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
                x[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
            }
        }
        // Half h of x[4 i + j] is now column 4 h + j of rows 4 i to 4 i + 3.
        UNROLL for (int j = 0; j < 4; j++) {
            store(to + j * stride, _mm256_permute2f128_ps(x[j], x[4 + j], 0x20));
            store(to + (4 + j) * stride, _mm256_permute2f128_ps(x[j], x[4 + j], 0x31));
        }
    }
};

#include "attention_stages.h"

#include "float_products.h"

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

const AttentionStages kAttentionAvx2 = {scores, weights, values};
const FloatProducts kFloatsAvx2 = kProducts;

}  // namespace edgespec
#endif
