// Activations in 8 bits by AVX2, for all sets of x86-64: with AVX-512 this is no slower.
#if defined(__x86_64__)
#include <immintrin.h>

#include "compiler.h"
#include "tables.h"

BEGIN_TARGET("avx2")
namespace edgespec {
namespace {

#include "blocks.h"

constexpr int kVectors = 4;  // of a block

// The bits of 8 sizes; as integers these have the order of the floats.
INLINE __m256i sizes(__m256 x) { return _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)); }

INLINE int32_t largest_lane(__m256i x) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}

// Packing works on each half of a vector alone: its groups of 4 are put in order afterwards.
INLINE __m256i bytes_of(const __m256i* x) {
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Sums of the two halves of a block. Only bytes without a sign are added up, so 16 times 128 comes off.
INLINE void add_up(__m256i bytes, int32_t* sums) {
    __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    __m128i first = _mm256_castsi256_si128(eights), second = _mm256_extracti128_si256(eights, 1);
    __m128i both = _mm_add_epi64(_mm_unpacklo_epi64(first, second), _mm_unpackhi_epi64(first, second));
    sums[0] = _mm_cvtsi128_si32(both) - 16 * 128;
    sums[1] = _mm_extract_epi32(both, 2) - 16 * 128;
}

// -32 times the sums of the first and the second two of each half's quads, for sets that add in 16 bits.
INLINE void set_pairs(ActivationBlock& to, __m256i bytes) {
    __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(32), bytes);
    sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0x4e));
    sums = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0xb1)));
    to.less_32[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(sums));
    to.less_32[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
}

template <bool in_pairs>
INLINE void quantize_block(const float* x, ActivationBlock& to) {
    __m256 values[kVectors];
    UNROLL for (int i = 0; i < kVectors; i++) values[i] = _mm256_loadu_ps(x + 8 * i);
    __m256i most = sizes(values[0]);
    UNROLL for (int i = 1; i < kVectors; i++) most = _mm256_max_epi32(most, sizes(values[i]));
    const float largest = largest_of(largest_lane(most));
    if (!(largest >= kSmallest)) return set_empty(to, largest);
    const __m256 inverse = _mm256_set1_ps(127 / largest);
    __m256i rounded[kVectors];
    UNROLL for (int i = 0; i < kVectors; i++) rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], inverse));
    const __m256i bytes = bytes_of(rounded);
    _mm256_store_si256((__m256i*)to.values, bytes);
    int32_t sums[2];
    add_up(bytes, sums);
    set_sums(to, largest / 127, sums[0], sums[1]);
    if (in_pairs) set_pairs(to, bytes);
}

}  // namespace

void quantize_avx2(const float* x, int64_t first_block, int64_t end_block, ActivationBlock* to) {
    for (int64_t b = first_block; b < end_block; b++) quantize_block<false>(x + 32 * b, to[b]);
}

void quantize_in_pairs(const float* x, int64_t first_block, int64_t end_block, ActivationBlock* to) {
    for (int64_t b = first_block; b < end_block; b++) quantize_block<true>(x + 32 * b, to[b]);
}

}  // namespace edgespec
END_TARGET
#endif
