// A panel's 16 rows as two vectors of 256 bits: for tile.h. Included inside the namespace and under the target of
// a file of products. Dot names what multiplies and adds bytes. Every broadcast of activations serves both vectors.

// 116 MB of Q4_0 by AVX2 on a Zen 3, times a bare read loop in turns, n = 1, 2, 3, 5: 1,152 bytes ahead into the first
// cache 0.91, 1.07, 1.22, 1.84; 2,304 1.13, 1.06, 1.23, 1.60, into the second 1.17, 1.10, 1.20, 1.53; 9,216 as 2,304.
constexpr Prefetch prefetch_for(int columns) { return columns == 1 ? Prefetch{1152, 3} : Prefetch{2304, 2}; }
constexpr int64_t kCachedBytes = 512 << 10;

struct Integers256 {
    __m256i of[2];
};

struct Floats256 {
    __m256 of[2];
};

template <class Dot>
struct Vector256 {
    using Bytes = Integers256;
    using Int = Integers256;
    using Float = Floats256;
    static constexpr bool signed_wide = Dot::signed_wide, pairs = false;
    template <class F>
    static constexpr bool in_pairs = false;

    // From 4 columns on, sums of floats wait in the first cache: they are used once for every 8 quads.
    template <class F>
    static constexpr int widest(int panels) { return panels == 2 ? 0 : 6; }

    static INLINE Bytes load(const uint8_t* at) {
        return {{_mm256_loadu_si256((const __m256i*)at), _mm256_loadu_si256((const __m256i*)(at + 32))}};
    }
    static INLINE Bytes masked(Bytes x, char mask) {
        const __m256i all = _mm256_set1_epi8(mask);
        return {{_mm256_and_si256(x.of[0], all), _mm256_and_si256(x.of[1], all)}};
    }
    // By a negative number of bits: to the right. What crosses bytes is masked away afterwards.
    template <int bits>
    static INLINE __m256i shifted(__m256i x) {
        return bits > 0 ? _mm256_slli_epi16(x, bits > 0 ? bits : 0) : _mm256_srli_epi16(x, bits > 0 ? 0 : -bits);
    }
    template <int bits>
    static INLINE Bytes left(Bytes x) {
        if constexpr (bits == 0) return x;
        return {{shifted<bits>(x.of[0]), shifted<bits>(x.of[1])}};
    }
    static INLINE Bytes with_bits(Bytes x, Bytes bits, char mask) {
        bits = masked(bits, mask);
        return {{_mm256_or_si256(x.of[0], bits.of[0]), _mm256_or_si256(x.of[1], bits.of[1])}};
    }
    static INLINE Bytes lookup(const uint8_t* table, Bytes x) {
        const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
        return {{_mm256_shuffle_epi8(values, x.of[0]), _mm256_shuffle_epi8(values, x.of[1])}};
    }
    // Quad I of activations, for `dot`.
    template <int I>
    static INLINE __m256i quads_with(const int8_t* x) {
        int32_t four;
        memcpy(&four, x + 4 * I, 4);
        return _mm256_set1_epi32(four);
    }
    template <bool wide, int>
    static INLINE Int dot(Int sum, Bytes weights, __m256i x) {
        return {{Dot::template add<wide>(sum.of[0], weights.of[0], x), Dot::template add<wide>(sum.of[1], weights.of[1], x)}};
    }
    static INLINE Int all(int32_t x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }

    static INLINE __m128i sixteen(const uint8_t* at) { return _mm_loadu_si128((const __m128i*)at); }
    static INLINE __m128i second_half(__m128i x) { return _mm_unpackhi_epi64(x, x); }
    static INLINE Float signed_bytes(const uint8_t* at) {
        const __m128i x = sixteen(at);
        return to_float({{_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(second_half(x))}});
    }
    static INLINE Int wide(__m128i x) { return {{_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(second_half(x))}}; }
    static INLINE Float unsigned_bytes(const uint8_t* at) { return to_float(wide(sixteen(at))); }
    static INLINE Float low_nibbles(const uint8_t* at) { return to_float(wide(_mm_and_si128(sixteen(at), _mm_set1_epi8(15)))); }
    static INLINE Float high_nibbles(const uint8_t* at) {
        return to_float(wide(_mm_and_si128(_mm_srli_epi16(sixteen(at), 4), _mm_set1_epi8(15))));
    }
    static INLINE Float e8m0(const uint8_t* at) {
        const Int exponents = wide(_mm_subs_epu8(sixteen(at), _mm_set1_epi8(1)));
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(exponents.of[0], 23)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(exponents.of[1], 23))}};
    }
    static INLINE Float wide_halves(__m128i first, __m128i second) { return {{_mm256_cvtph_ps(first), _mm256_cvtph_ps(second)}}; }
    // As halves whose exponents are too small.
    static INLINE Float e4m3(const uint8_t* at) {
        const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen(at)), 7);
        return wide_halves(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    }
    static INLINE Float halves(const uint8_t* at) { return wide_halves(sixteen(at), sixteen(at + 16)); }
    static INLINE Float negative(Float x) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {{_mm256_xor_ps(x.of[0], sign), _mm256_xor_ps(x.of[1], sign)}};
    }
    static INLINE Float to_float(Int x) { return {{_mm256_cvtepi32_ps(x.of[0]), _mm256_cvtepi32_ps(x.of[1])}}; }
    static INLINE Float times(Float a, Float b) {
        return {{_mm256_mul_ps(a.of[0], b.of[0]), _mm256_mul_ps(a.of[1], b.of[1])}};
    }
    static INLINE Float add_product(Float a, Float b, Float sum) {
        return {{_mm256_fmadd_ps(a.of[0], b.of[0], sum.of[0]), _mm256_fmadd_ps(a.of[1], b.of[1], sum.of[1])}};
    }
    static INLINE Float all(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
    static INLINE void store(float* at, Float x) {
        _mm256_storeu_ps(at, x.of[0]);
        _mm256_storeu_ps(at + 8, x.of[1]);
    }
};
