// Attention and products of floats by NEON: 4 floats are one vector.
#include "compiler.h"

#if defined(HAVE_DOTPROD)
#include <arm_neon.h>

#include "tables.h"

namespace edgespec {
namespace {

struct V {
    using Float = float32x4_t;
    using Total = int64x2_t;
    static constexpr int lanes = 4;
    static constexpr int most_rows = 12;

    static INLINE Float load(const float* at) { return vld1q_f32(at); }
    static INLINE void store(float* at, Float x) { vst1q_f32(at, x); }
    static INLINE Float all(float x) { return vdupq_n_f32(x); }
    static INLINE Float plus(Float a, Float b) { return vaddq_f32(a, b); }
    static INLINE Float minus(Float a, Float b) { return vsubq_f32(a, b); }
    static INLINE Float times(Float a, Float b) { return vmulq_f32(a, b); }
    static INLINE Float divide(Float a, Float b) { return vdivq_f32(a, b); }
    static INLINE Float add_product(Float a, Float b, Float sum) { return vfmaq_f32(sum, a, b); }
    static INLINE Float max(Float a, Float b) { return vmaxq_f32(a, b); }
    static INLINE float largest(Float x) { return vmaxvq_f32(x); }
    static INLINE Float size(Float x) { return vabsq_f32(x); }
    static INLINE Float with_sign(Float x, Float sign) { return vbslq_f32(vdupq_n_u32(1u << 31), sign, x); }
    static INLINE Float round(Float x) { return vrndnq_f32(x); }
    static INLINE Float times_power_of_2(Float x, Float n) {
        int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
        return times(x, vreinterpretq_f32_s32(exponent));
    }
    static INLINE Float zero_below(Float x, Float of, float least) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcltq_f32(of, all(least))));
    }

    // Of 2 / width results of each of two vectors: the halves of their 2 x width partial sums, added.
    template <int width>
    static INLINE Float fold(Float a, Float b) {
        if constexpr (width == 1) return plus(vuzp1q_f32(a, b), vuzp2q_f32(a, b));
        return plus(vcombine_f32(vget_low_f32(a), vget_low_f32(b)), vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
    }

    static INLINE float half(const void* at) {
        uint16_t bits;
        memcpy(&bits, at, sizeof bits);
        return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0);
    }
    static INLINE uint16x4_t four_words(const void* at) {
        uint16x4_t words;
        memcpy(&words, at, sizeof words);
        return words;
    }
    static INLINE Float halves(const void* at) { return vcvt_f32_f16(vreinterpret_f16_u16(four_words(at))); }
    static INLINE Float bf16(const void* at) { return vreinterpretq_f32_u32(vshll_n_u16(four_words(at), 16)); }
    static INLINE Float signed_bytes(const int8_t* at) {
        int8x8_t bytes = vdup_n_s8(0);
        memcpy(&bytes, at, lanes);
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
    }

    // A sum of integers: what floats round to.
    static INLINE Total none() { return vdupq_n_s64(0); }
    static INLINE Total add_rounded(Total sum, Float x) { return vpadalq_s32(sum, vcvtnq_s32_f32(x)); }
    static INLINE int64_t integer(Total sum) { return vaddvq_s64(sum); }

    static INLINE void transpose(const float* from, int64_t from_stride, float* to, int64_t stride) {
        const Float a = load(from), b = load(from + from_stride), c = load(from + 2 * from_stride),
                    d = load(from + 3 * from_stride);
        const float32x4x2_t ab = vtrnq_f32(a, b), cd = vtrnq_f32(c, d);
        store(to, vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0])));
        store(to + stride, vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1])));
        store(to + 2 * stride, vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0])));
        store(to + 3 * stride, vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1])));
    }
};

#include "attention_stages.h"

#include "float_products.h"

}  // namespace

const AttentionStages kAttentionNeon = {scores, weights, values};
const FloatProducts kFloatsNeon = kProducts;

}  // namespace edgespec
#endif
