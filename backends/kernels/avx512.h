// 16 rows as one AVX-512 vector: for tile.h, and shared by the sets that have AVX-512. Included inside the
// namespace and under the target of a file of products.

// Products of one and two columns wait for memory alone; those of more compute meanwhile, and weights that come
// far ahead into the second cache are there in time. 852 MB of Q4_0, n = 1, 2, 3, 4, 6 on a Zen 4 that reads them
// in 14.8 ms: 14.6, 16.7, 18.6, 21.6, 35.6 ms with the first line for all, 21.4, 18.4, 16.0, 18.4, 26.7 with the second.
constexpr Prefetch prefetch_for(int columns) {
    return columns < 3 ? Prefetch{4608, 3} : Prefetch{9216, 2};
}
constexpr int64_t kCachedBytes = 512 << 10;

struct Avx512 {
    using Bytes = __m512i;
    using Int = __m512i;
    using Float = __m512;
    // Columns of a tile: their integer and float sums fill the registers.
    template <class F>
    static constexpr int widest(int panels) {
        return F::has_halves ? (panels == 2 ? 4 : 8) : (panels == 2 ? 6 : 12);
    }
    static constexpr bool signed_wide = false, pairs = false;
    template <class F>
    static constexpr bool in_pairs = false;

    static INLINE Bytes load(const uint8_t* at) { return _mm512_loadu_si512(at); }
    static INLINE Bytes masked(Bytes x, char mask) { return _mm512_and_si512(x, _mm512_set1_epi8(mask)); }
    // By a negative number of bits: to the right. What crosses bytes is masked away afterwards.
    template <int bits>
    static INLINE Bytes left(Bytes x) {
        if constexpr (bits == 0) return x;
        return bits > 0 ? _mm512_slli_epi16(x, bits > 0 ? bits : 0) : _mm512_srli_epi16(x, bits > 0 ? 0 : -bits);
    }
    // x | (bits & mask) in one operation.
    static INLINE Bytes with_bits(Bytes x, Bytes bits, char mask) {
        return _mm512_ternarylogic_epi32(x, bits, _mm512_set1_epi8(mask), 0xf8);
    }
    static INLINE Bytes lookup(const uint8_t* table, Bytes x) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), x);
    }

    // Quad I of activations, for `dot`.
    template <int I>
    static INLINE Bytes quads_with(const int8_t* x) {
        int32_t four;
        memcpy(&four, x + 4 * I, 4);
        return _mm512_set1_epi32(four);
    }
    template <bool wide, int>
    static INLINE Int dot(Int sum, Bytes weights, Bytes x) { return _mm512_dpbusd_epi32(sum, weights, x); }
    static INLINE Int all(int32_t x) { return _mm512_set1_epi32(x); }

    static INLINE Float signed_bytes(const uint8_t* at) {
        return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
    }
    static INLINE Float unsigned_bytes(const uint8_t* at) {
        return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)));
    }
    static INLINE Float low_nibbles(const uint8_t* at) {
        return to_float(_mm512_cvtepu8_epi32(_mm_and_si128(_mm_loadu_si128((const __m128i*)at), _mm_set1_epi8(15))));
    }
    static INLINE Float high_nibbles(const uint8_t* at) {
        __m128i bytes = _mm_srli_epi16(_mm_loadu_si128((const __m128i*)at), 4);
        return to_float(_mm512_cvtepu8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15))));
    }
    static INLINE Float e8m0(const uint8_t* at) {
        __m128i exponents = _mm_subs_epu8(_mm_loadu_si128((const __m128i*)at), _mm_set1_epi8(1));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(exponents), 23));
    }
    // As halves whose exponents are too small.
    static INLINE Float e4m3(const uint8_t* at) {
        return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)at)), 7));
    }
    static INLINE Float negative(Float x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }
    static INLINE Float halves(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
    static INLINE Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
    static INLINE Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static INLINE Float add_product(Float a, Float b, Float sum) { return _mm512_fmadd_ps(a, b, sum); }
    static INLINE Float all(float x) { return _mm512_set1_ps(x); }
    static INLINE void store(float* at, Float x) { _mm512_storeu_ps(at, x); }
};
