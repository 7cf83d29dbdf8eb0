// Products by AVX-VNNI: 256 bits, on processors without AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include "compiler.h"
#include "tables.h"

BEGIN_TARGET("avx2,fma,f16c,avxvnni")
namespace edgespec {
namespace {

#include "avx2.h"

#include "tile.h"

struct Quads {
    static constexpr bool signed_wide = false;

    template <bool wide>
    static INLINE __m256i add(__m256i sum, __m256i weights, __m256i x) {
        return _mm256_dpbusd_avx_epi32(sum, weights, x);
    }
};

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

static bool runs_here() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() && has_avx_vnni();
}

const InstructionSet kAvxVnni =
    table<Products<Vector256<Quads>>::Of>("avx_vnni", runs_here, quantize_avx2, &kAttentionAvx2, kFloatsAvx2);

}  // namespace edgespec
#endif
