// 8 of a panel's 16 rows as one vector of 256 bits: for tile.h. Included inside the namespace and under the
// target of a file of products. Dot names what multiplies and adds bytes.

constexpr Prefetch prefetch_for(int) { return {2304, 3}; }
constexpr int64_t kCachedBytes = 512 << 10;

template <class Dot, int Half>
struct Vector256 {
    using Bytes = __m256i;
    using Int = __m256i;
    using Partial = __m256i;
    using Float = __m256;
    static constexpr bool signed_wide = Dot::signed_wide, pairs = false;

    template <class F>
    static constexpr int widest(int panels) { return Dot::template widest<F>(panels); }

    static INLINE Bytes load(const uint8_t* at) { return _mm256_loadu_si256((const __m256i*)(at + 32 * Half)); }
    static INLINE Bytes masked(Bytes x, char mask) { return _mm256_and_si256(x, _mm256_set1_epi8(mask)); }
    // By a negative number of bits: to the right. What crosses bytes is masked away afterwards.
    template <int bits>
    static INLINE Bytes left(Bytes x) {
        if constexpr (bits == 0) return x;
        return bits > 0 ? _mm256_slli_epi16(x, bits > 0 ? bits : 0) : _mm256_srli_epi16(x, bits > 0 ? 0 : -bits);
    }
    static INLINE Bytes with_bits(Bytes x, Bytes bits, char mask) { return _mm256_or_si256(x, masked(bits, mask)); }
    static INLINE Bytes lookup(const uint8_t* table, Bytes x) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), x);
    }
    // Quad I of activations, for `dot`.
    template <int I>
    static INLINE Bytes quads_with(const int8_t* x) {
        int32_t four;
        memcpy(&four, x + 4 * I, 4);
        return _mm256_set1_epi32(four);
    }
    static constexpr int room(int weight_bits) { return Dot::room(weight_bits); }
    static INLINE Partial begin(Int sum) { return Dot::begin(sum); }
    static INLINE Int finish(Partial sum, Int before) { return Dot::finish(sum, before); }
    template <bool wide, int>
    static INLINE Partial dot(Partial sum, Bytes weights, Bytes x) { return Dot::template add<wide>(sum, weights, x); }
    static INLINE Int all(int32_t x) { return _mm256_set1_epi32(x); }

    static INLINE __m128i eight(const uint8_t* at) { return _mm_loadl_epi64((const __m128i*)(at + 8 * Half)); }
    static INLINE Float signed_bytes(const uint8_t* at) { return to_float(_mm256_cvtepi8_epi32(eight(at))); }
    static INLINE Float unsigned_bytes(const uint8_t* at) { return to_float(_mm256_cvtepu8_epi32(eight(at))); }
    static INLINE Float low_nibbles(const uint8_t* at) {
        return to_float(_mm256_cvtepu8_epi32(_mm_and_si128(eight(at), _mm_set1_epi8(15))));
    }
    static INLINE Float high_nibbles(const uint8_t* at) {
        return to_float(_mm256_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(eight(at), 4), _mm_set1_epi8(15))));
    }
    static INLINE Float e8m0(const uint8_t* at) {
        __m128i exponents = _mm_subs_epu8(eight(at), _mm_set1_epi8(1));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(exponents), 23));
    }
    // As halves whose exponents are too small.
    static INLINE Float e4m3(const uint8_t* at) {
        return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(eight(at)), 7));
    }
    static INLINE Float negative(Float x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }
    static INLINE Float halves(const uint8_t* at) {
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + 16 * Half)));
    }
    static INLINE Float to_float(Int x) { return _mm256_cvtepi32_ps(x); }
    static INLINE Float times(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static INLINE Float add_product(Float a, Float b, Float sum) { return _mm256_fmadd_ps(a, b, sum); }
    static INLINE Float all(float x) { return _mm256_set1_ps(x); }
    static INLINE void store(float* at, Float x) { _mm256_storeu_ps(at + 8 * Half, x); }
};
