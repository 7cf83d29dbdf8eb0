// 8 of a panel's 16 rows as two vectors of 128 bits: for tile.h. Included inside the namespace of a file of
// products, under its target.

constexpr Prefetch prefetch_for(int) { return {2304, 3}; }
constexpr int64_t kCachedBytes = 256 << 10;

template <int Half>
struct Neon {
    using Bytes = uint8x16x2_t;
    using Int = int32x4x2_t;
    using Float = float32x4x2_t;
    static constexpr bool signed_wide = true, pairs = false;
    template <class F>
    static constexpr bool in_pairs = false;

    template <class F>
    static constexpr int widest(int panels) { return panels == 2 ? 0 : F::has_halves ? 4 : 6; }

    static INLINE Bytes load(const uint8_t* at) { return {{vld1q_u8(at + 32 * Half), vld1q_u8(at + 32 * Half + 16)}}; }
    static INLINE Bytes masked(Bytes x, char mask) {
        const uint8x16_t all = vdupq_n_u8(uint8_t(mask));
        return {{vandq_u8(x.val[0], all), vandq_u8(x.val[1], all)}};
    }
    // By a negative number of bits: to the right.
    template <int bits>
    static INLINE Bytes left(Bytes x) {
        const int8x16_t by = vdupq_n_s8(bits);
        return {{vshlq_u8(x.val[0], by), vshlq_u8(x.val[1], by)}};
    }
    static INLINE Bytes with_bits(Bytes x, Bytes bits, char mask) {
        bits = masked(bits, mask);
        return {{vorrq_u8(x.val[0], bits.val[0]), vorrq_u8(x.val[1], bits.val[1])}};
    }
    static INLINE Bytes lookup(const uint8_t* table, Bytes x) {
        const uint8x16_t values = vld1q_u8(table);
        return {{vqtbl1q_u8(values, x.val[0]), vqtbl1q_u8(values, x.val[1])}};
    }
    // Quads of activations with quad I among them, which `dot` picks.
    template <int I>
    static INLINE int8x16_t quads_with(const int8_t* x) { return vld1q_s8(x + I / 4 * 16); }
    // Weights up to 63 are signed bytes as they are; those of 8 bits lose the 128 that was added to them.
    template <bool wide>
    static INLINE int8x16_t signed_weights(uint8x16_t weights) {
        return vreinterpretq_s8_u8(wide ? veorq_u8(weights, vdupq_n_u8(0x80)) : weights);
    }
    template <bool wide, int I>
    static INLINE Int dot(Int sum, Bytes weights, int8x16_t x) {
        return {{vdotq_laneq_s32(sum.val[0], signed_weights<wide>(weights.val[0]), x, I % 4),
                 vdotq_laneq_s32(sum.val[1], signed_weights<wide>(weights.val[1]), x, I % 4)}};
    }
    static INLINE Int all(int32_t x) { return {{vdupq_n_s32(x), vdupq_n_s32(x)}}; }

    static INLINE uint8x8_t eight(const uint8_t* at) { return vld1_u8(at + 8 * Half); }
    static INLINE Float wide_bytes(int16x8_t x) {
        return to_float({{vmovl_s16(vget_low_s16(x)), vmovl_s16(vget_high_s16(x))}});
    }
    static INLINE Float wide_halves(float16x8_t x) {
        return {{vcvt_f32_f16(vget_low_f16(x)), vcvt_f32_f16(vget_high_f16(x))}};
    }
    static INLINE Float signed_bytes(const uint8_t* at) { return wide_bytes(vmovl_s8(vreinterpret_s8_u8(eight(at)))); }
    static INLINE Float unsigned_bytes(const uint8_t* at) { return wide_bytes(vreinterpretq_s16_u16(vmovl_u8(eight(at)))); }
    static INLINE Float low_nibbles(const uint8_t* at) {
        return wide_bytes(vreinterpretq_s16_u16(vmovl_u8(vand_u8(eight(at), vdup_n_u8(15)))));
    }
    static INLINE Float high_nibbles(const uint8_t* at) {
        return wide_bytes(vreinterpretq_s16_u16(vmovl_u8(vshr_n_u8(eight(at), 4))));
    }
    static INLINE Float e8m0(const uint8_t* at) {
        const uint16x8_t exponents = vmovl_u8(vqsub_u8(eight(at), vdup_n_u8(1)));
        return {{vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(exponents)), 23)),
                 vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(exponents)), 23))}};
    }
    // As halves whose exponents are too small.
    static INLINE Float e4m3(const uint8_t* at) { return wide_halves(vreinterpretq_f16_u16(vshlq_n_u16(vmovl_u8(eight(at)), 7))); }
    static INLINE Float negative(Float x) { return {{vnegq_f32(x.val[0]), vnegq_f32(x.val[1])}}; }
    static INLINE Float halves(const uint8_t* at) { return wide_halves(vreinterpretq_f16_u8(vld1q_u8(at + 16 * Half))); }
    static INLINE Float to_float(Int x) { return {{vcvtq_f32_s32(x.val[0]), vcvtq_f32_s32(x.val[1])}}; }
    static INLINE Float times(Float a, Float b) {
        return {{vmulq_f32(a.val[0], b.val[0]), vmulq_f32(a.val[1], b.val[1])}};
    }
    static INLINE Float add_product(Float a, Float b, Float sum) {
        return {{vfmaq_f32(sum.val[0], a.val[0], b.val[0]), vfmaq_f32(sum.val[1], a.val[1], b.val[1])}};
    }
    static INLINE Float all(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x)}}; }
    static INLINE void store(float* at, Float x) {
        vst1q_f32(at + 8 * Half, x.val[0]);
        vst1q_f32(at + 8 * Half + 4, x.val[1]);
    }
};

// Eight activations in units of 1 / inverse, rounded.
INLINE int8x8_t rounded(const float32x4_t* x, float inverse) {
    const int32x4_t first = vcvtnq_s32_f32(vmulq_n_f32(x[0], inverse)), second = vcvtnq_s32_f32(vmulq_n_f32(x[1], inverse));
    return vmovn_s16(vcombine_s16(vmovn_s32(first), vmovn_s32(second)));
}

INLINE void quantize_block(const float* x, ActivationBlock& to) {
    float32x4_t values[8];
    uint32x4_t sizes = vdupq_n_u32(0);  // as integers, these have the order of the floats
    UNROLL for (int i = 0; i < 8; i++) {
        values[i] = vld1q_f32(x + 4 * i);
        sizes = vmaxq_u32(sizes, vreinterpretq_u32_f32(vabsq_f32(values[i])));
    }
    const float largest = largest_of(int32_t(vmaxvq_u32(sizes)));
    if (!(largest >= kSmallest)) return set_empty(to, largest);
    const float inverse = 127 / largest;
    int32_t sums[2];
    UNROLL for (int half = 0; half < 2; half++) {
        const int8x16_t bytes = vcombine_s8(rounded(values + 4 * half, inverse), rounded(values + 4 * half + 2, inverse));
        vst1q_s8(to.values + 16 * half, bytes);
        sums[half] = vaddlvq_s8(bytes);
    }
    set_sums(to, largest / 127, sums[0], sums[1]);
}

void quantize_neon(const float* x, int64_t first, int64_t end, ActivationBlock* to) {
    for (int64_t b = first; b < end; b++) quantize_block(x + 32 * b, to[b]);
}
