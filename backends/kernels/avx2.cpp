// Products by AVX2, for processors without an instruction for dot products of bytes.
#if defined(__x86_64__)
#include <immintrin.h>

#include "compiler.h"
#include "tables.h"

BEGIN_TARGET("avx2,fma,f16c")
namespace edgespec {
namespace {

#include "avx2.h"

#include "tile.h"

// Compilers would first multiply all and then add, for which 16 registers are not enough.
INLINE __m256i in_order(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}

// 16 bits by 16 bits and pairs of these added, and the sum before.
INLINE __m256i add_pairs(__m256i a, __m256i b, __m256i sum) { return in_order(_mm256_add_epi32(_mm256_madd_epi16(a, b), sum)); }

// Weights of 8 bits go as their size, with their sign on the activation: 2 x 128 x 127 fits into 16 bits once.
struct Pairs {
    static constexpr bool signed_wide = true;

    template <bool wide>
    static INLINE __m256i add(__m256i sum, __m256i weights, __m256i x) {
        if constexpr (!wide) return in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x)));
        const __m256i value = _mm256_xor_si256(weights, _mm256_set1_epi8(char(0x80)));
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(x, value));
        return add_pairs(pairs, _mm256_set1_epi16(1), sum);
    }
};

// Pairs of products are added in 16 bits, and as many of these sums as have room there before they become 32 bits wide.
struct Avx2 : Vector256<Pairs> {
    template <class F>
    static constexpr bool in_pairs = !F::is_wide;

    // Quads of weights without their offset.
    static constexpr int room(int weight_bits) { return 8 >> std::max(0, weight_bits - 4); }
    // The sums of half a block that take an offset off, from those of 32. Half a group of weights below 64 has room.
    template <int offset>
    static INLINE Int starts(int32_t less_32) {
        if constexpr (offset == 0) {
            return all(0);
        } else {
            const __m256i less = _mm256_srai_epi16(_mm256_set1_epi32(less_32), shift_of(32, offset));
            return {{less, less}};
        }
    }
    // A small scale for each of a row's pairs.
    template <class F>
    static INLINE Int small_pairs(const uint8_t* at) {
        __m128i bytes = sixteen(at);
        if constexpr (F::traits.small == Small::halves_with_minimum) bytes = _mm_and_si128(bytes, _mm_set1_epi8(15));
        const __m256i words = _mm256_permute4x64_epi64(_mm256_cvtepi8_epi16(bytes), 0xd8);
        return {{_mm256_unpacklo_epi16(words, words), _mm256_unpackhi_epi16(words, words)}};
    }
    static INLINE Int ones() { return {{_mm256_set1_epi16(1), _mm256_set1_epi16(1)}}; }
    static INLINE Int add_pairs(Int a, Int b, Int sum) {
        return {{edgespec::add_pairs(a.of[0], b.of[0], sum.of[0]), edgespec::add_pairs(a.of[1], b.of[1], sum.of[1])}};
    }
};

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

static bool runs_here() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

const InstructionSet kAvx2 =
    table<Products<Avx2>::Of>("avx2", runs_here, quantize_in_pairs, &kAttentionAvx2, kFloatsAvx2);

}  // namespace edgespec
#endif
