// Products by NEON with the matrix products of Armv8.6 ("i8mm"): 2 rows x 8 weights times 8 x 2 columns is one
// instruction.
#include "compiler.h"

#if defined(HAVE_I8MM)
#include <arm_neon.h>

#include "tables.h"

// Compilers name it differently.
#if defined(__clang__)
BEGIN_TARGET("dotprod,i8mm")
#else
BEGIN_TARGET("arch=armv8.2-a+dotprod+i8mm")
#endif
namespace edgespec {
namespace {

#include "blocks.h"

#include "neon.h"

template <int Half>
struct NeonPairs : Neon<Half> {
    static constexpr bool pairs = true;

    // Products of a group and N columns, two of them at a time.
    template <class F, int N>
    static INLINE void group_products(const uint8_t* group, const ActivationBlock* x, int64_t stride,
                                      float32x4x2_t (*to)[1]);
};

#include "tile.h"

// Column t of N. An odd last one is multiplied twice.
template <int N>
INLINE const ActivationBlock& at(const ActivationBlock* x, int64_t stride, int t) {
    return x[std::min(t, N - 1) * stride];
}

// Sums of 8 rows and a pair of columns: in each vector two rows, and both columns of each.
template <class V, class F, int N>
INLINE void start_pairs(const ActivationBlock* x, int64_t stride, int half, int32x4_t (*sums)[4]) {
    UNROLL for (int pair = 0; pair < (N + 1) / 2; pair++) {
        const int32_t both[2] = {start<V, F>(at<N>(x, stride, 2 * pair), half),
                                 start<V, F>(at<N>(x, stride, 2 * pair + 1), half)};
        for (int i = 0; i < 4; i++) sums[pair][i] = vcombine_s32(vld1_s32(both), vld1_s32(both));
    }
}

INLINE int8x16_t zipped(uint8x16_t a, uint8x16_t b, bool second) {
    const uint32x4_t left = vreinterpretq_u32_u8(a), right = vreinterpretq_u32_u8(b);
    return vreinterpretq_s8_u32(second ? vzip2q_u32(left, right) : vzip1q_u32(left, right));
}

// Quads I and I + 1 side by side are 8 weights of each row.
template <class V, class F, int I, int N>
INLINE void add_two_quads(const uint8_t* group, const ActivationBlock* x, int64_t stride, int32x4_t (*sums)[4]) {
    const uint8x16x2_t a = quad<V, F, I>(group), b = quad<V, F, I + 1>(group);
    int8x16_t rows[4];
    for (int i = 0; i < 4; i++) {
        rows[i] = zipped(a.val[i / 2], b.val[i / 2], i % 2);
        if (F::is_wide) rows[i] = veorq_s8(rows[i], vdupq_n_s8(-128));
    }
    UNROLL for (int pair = 0; pair < (N + 1) / 2; pair++) {
        const int8x16_t both = vcombine_s8(vld1_s8(at<N>(x, stride, 2 * pair).values + 4 * I),
                                           vld1_s8(at<N>(x, stride, 2 * pair + 1).values + 4 * I));
        for (int i = 0; i < 4; i++) sums[pair][i] = vmmlaq_s32(sums[pair][i], rows[i], both);
    }
}

template <class V>
INLINE float32x4x2_t column_of(const int32x4_t* sums, int second) {
    if (second) return V::to_float({{vuzp2q_s32(sums[0], sums[1]), vuzp2q_s32(sums[2], sums[3])}});
    return V::to_float({{vuzp1q_s32(sums[0], sums[1]), vuzp1q_s32(sums[2], sums[3])}});
}

template <int Half>
template <class F, int N>
INLINE void NeonPairs<Half>::group_products(const uint8_t* group, const ActivationBlock* x, int64_t stride,
                                            float32x4x2_t (*to)[1]) {
    using V = NeonPairs<Half>;
    int32x4_t sums[(N + 1) / 2][4];
    start_pairs<V, F, N>(x, stride, 0, sums);
    add_two_quads<V, F, 0, N>(group, x, stride, sums);
    add_two_quads<V, F, 2, N>(group, x, stride, sums);
    if constexpr (F::has_halves) {
        UNROLL for (int t = 0; t < N; t++)
            to[t][0] = V::times(column_of<V>(sums[t / 2], t % 2), small_of<V, F>(group, 0));
        start_pairs<V, F, N>(x, stride, 1, sums);
    }
    add_two_quads<V, F, 4, N>(group, x, stride, sums);
    add_two_quads<V, F, 6, N>(group, x, stride, sums);
    UNROLL for (int t = 0; t < N; t++) {
        const float32x4x2_t value = column_of<V>(sums[t / 2], t % 2);
        if constexpr (F::has_halves)
            to[t][0] = V::add_product(value, small_of<V, F>(group, 1), to[t][0]);
        else
            to[t][0] = value;
    }
}

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

static bool runs_here() { return has_dotprod() && has_i8mm(); }

const InstructionSet kNeonI8mm =
    table<Products<NeonPairs<0>, NeonPairs<1>>::Of>("neon_i8mm", runs_here, quantize_neon, &kAttentionNeon, kFloatsNeon);

}  // namespace edgespec
#endif
