// Products by AVX-VNNI: 256 bits, on processors without AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "compiler.h"
#include "tables.h"

BEGIN_TARGET("avx2,fma,f16c,avxvnni")
namespace edgespec {
namespace {

#include "blocks.h"

#include "avx2.h"

#include "tile.h"

struct Quads {
    static constexpr bool signed_wide = false;
    static constexpr int widest = 5;

    template <bool wide>
    static INLINE __m256i add(__m256i sum, __m256i weights, __m256i x) {
        return _mm256_dpbusd_avx_epi32(sum, weights, x);
    }
};

template <class F>
struct Multiply {
    static void run(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n,
                    float* out, int64_t out_stride) {
        multiply<F, Vector256<Quads, 0>, Vector256<Quads, 1>>(panels, first, end, k, x, n, out, out_stride);
    }
};

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

static bool runs_here() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() && has_avx_vnni();
}

const InstructionSet kAvxVnni = table<Multiply>("avx_vnni", runs_here, quantize_avx2, &kAttentionAvx2);

}  // namespace edgespec
#endif
