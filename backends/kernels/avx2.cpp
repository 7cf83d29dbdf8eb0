// Products by AVX2, for processors without an instruction for dot products of bytes.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "compiler.h"
#include "tables.h"

BEGIN_TARGET("avx2,fma,f16c")
namespace edgespec {
namespace {

#include "blocks.h"

#include "avx2.h"

#include "tile.h"

// Products of pairs are added in 16 bits. Weights up to 63 fit; those of 8 bits would not, and go as their
// size, with their sign on the activation: 2 x 128 x 127 fits.
struct Pairs {
    static constexpr bool signed_wide = true;
    static constexpr int widest = 4;

    template <bool wide>
    static INLINE __m256i add(__m256i sum, __m256i weights, __m256i x) {
        if constexpr (wide) {
            __m256i value = _mm256_xor_si256(weights, _mm256_set1_epi8(char(0x80)));
            weights = _mm256_abs_epi8(value);
            x = _mm256_sign_epi8(x, value);
        }
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(1)));
    }
};

template <class F>
struct Multiply {
    static void run(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n,
                    float* out, int64_t out_stride) {
        multiply<F, Vector256<Pairs, 0>, Vector256<Pairs, 1>>(panels, first, end, k, x, n, out, out_stride);
    }
};

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

static bool runs_here() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

const InstructionSet kAvx2 = table<Multiply>("avx2", runs_here, quantize_avx2, &kAttentionAvx2);

}  // namespace edgespec
#endif
