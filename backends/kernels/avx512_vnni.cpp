// Products by AVX-512 VNNI: 16 rows are one vector.
#if defined(__x86_64__) || defined(_M_X64)
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tables.h"

// GCC 12 warns of its own header's undefined vectors (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#include <immintrin.h>

namespace edgespec {
namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int kPrefetch = 2304;
constexpr int64_t kCachedBytes = 512 << 10;

struct Avx512 {
    using Bytes = __m512i;
    using Int = __m512i;
    using Float = __m512;

    static INLINE Bytes load(const uint8_t* at) { return _mm512_loadu_si512(at); }
    static INLINE Bytes masked(Bytes x, char mask) { return _mm512_and_si512(x, _mm512_set1_epi8(mask)); }
    template <int bits>
    static INLINE Bytes right(Bytes x) { return _mm512_srli_epi16(x, bits); }
    template <int bits>
    static INLINE Bytes left(Bytes x) { return _mm512_slli_epi16(x, bits); }
    // x | (bits & mask) in one operation.
    static INLINE Bytes with_bits(Bytes x, Bytes bits, char mask) {
        return _mm512_ternarylogic_epi32(x, bits, _mm512_set1_epi8(mask), 0xf8);
    }
    static INLINE Bytes lookup(const uint8_t* table, Bytes x) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), x);
    }

    template <int First, int End>
    static INLINE Int dot(const Bytes* quads, const ActivationBlock& x, int32_t start) {
        Int sum = _mm512_set1_epi32(start);
        for (int i = First; i < End; i++) {
            int32_t quad;
            memcpy(&quad, x.values + 4 * i, 4);
            sum = _mm512_dpbusd_epi32(sum, quads[i], _mm512_set1_epi32(quad));
        }
        return sum;
    }
    template <int First, int End>
    static INLINE Int dot_wide(const Bytes* quads, const ActivationBlock& x, int32_t start) {
        return dot<First, End>(quads, x, start);
    }
    static INLINE Int scaled_sum(Int a, Int scale_a, Int b, Int scale_b) {
        return _mm512_add_epi32(_mm512_mullo_epi32(a, scale_a), _mm512_mullo_epi32(b, scale_b));
    }
    static INLINE Int signed_bytes(const uint8_t* at) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
    }
    static INLINE Int unsigned_bytes(const uint8_t* at) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
    }
    static INLINE Int negative(Int x) { return _mm512_sub_epi32(_mm512_setzero_si512(), x); }

    static INLINE Float halves(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
    static INLINE Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
    static INLINE Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static INLINE Float add_product(Float a, Float b, Float sum) { return _mm512_fmadd_ps(a, b, sum); }
    static INLINE Float all(float x) { return _mm512_set1_ps(x); }
    static INLINE Float zero() { return _mm512_setzero_ps(); }
    static INLINE void store(float* at, Float x) { _mm512_storeu_ps(at, x); }
};

#include "tile.h"

INLINE __m512i rounded(__m512 x, __m512 inverse) { return _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)); }

void quantize_block(const float* x, ActivationBlock& to) {
    __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    float max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    __m512 inverse = _mm512_set1_ps(max > 0 ? 127 / max : 0);
    __m512i p = rounded(a, inverse), q = rounded(b, inverse);
    int32_t sums[2] = {_mm512_reduce_add_epi32(p), _mm512_reduce_add_epi32(q)};
    _mm_store_si128((__m128i*)to.values, _mm512_cvtepi32_epi8(p));
    _mm_store_si128((__m128i*)(to.values + 16), _mm512_cvtepi32_epi8(q));
    to.scale = max / 127;
    to.scaled_sum = to.scale * float(sums[0] + sums[1]);
    to.less_8 = -8 * (sums[0] + sums[1]);
    to.less_128 = -128 * (sums[0] + sums[1]);
    to.less_32[0] = -32 * sums[0];
    to.less_32[1] = -32 * sums[1];
}

void quantize_avx512(const float* x, int64_t first, int64_t end, ActivationBlock* to) {
    for (int64_t b = first; b < end; b++) quantize_block(x + 32 * b, to[b]);
}

template <class F>
struct Multiply {
    static void run(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n,
                    float* out, int64_t out_stride) {
        multiply<Avx512, F>(panels, first, end, k, x, n, out, out_stride);
    }
};

}  // namespace
}  // namespace edgespec
#pragma GCC pop_options

namespace edgespec {

static bool runs_here() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
}

const InstructionSet kAvx512Vnni = table<Multiply>("avx512_vnni", runs_here, quantize_avx512);

}  // namespace edgespec
#endif
