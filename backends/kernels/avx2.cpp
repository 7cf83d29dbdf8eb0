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

// Pairs of products are added in 16 bits, and as many of these sums as have room there before they become 32
// bits wide. Weights of 8 bits go as their size, with their sign on the activation: 2 x 128 x 127 fits once.
struct Pairs {
    static constexpr bool signed_wide = true;

    // Compilers would first multiply all and then add, for which 16 registers are not enough.
    static INLINE __m256i in_order(__m256i sum) {
        asm("" : "+x"(sum));
        return sum;
    }
    static constexpr int room(int weight_bits) { return 8 >> (weight_bits == 8 ? 3 : std::max(0, weight_bits - 4)); }
    static INLINE __m256i begin(__m256i) { return _mm256_setzero_si256(); }
    static INLINE __m256i finish(__m256i sum, __m256i before) {
        return in_order(_mm256_add_epi32(before, _mm256_madd_epi16(sum, _mm256_set1_epi16(1))));
    }
    template <bool wide>
    static INLINE __m256i add(__m256i sum, __m256i weights, __m256i x) {
        if constexpr (wide) {
            __m256i value = _mm256_xor_si256(weights, _mm256_set1_epi8(char(0x80)));
            weights = _mm256_abs_epi8(value);
            x = _mm256_sign_epi8(x, value);
        }
        return in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x)));
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
    table<Products<Vector256<Pairs>>::Of>("avx2", runs_here, quantize_avx2, &kAttentionAvx2, kFloatsAvx2);

}  // namespace edgespec
#endif
