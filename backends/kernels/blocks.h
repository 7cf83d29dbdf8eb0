// What all sets do alike with a block of 32 activations. Included inside the namespace of each, as tile.h is.

// Below this 127 / largest may be infinite: such a block counts as zero.
constexpr float kSmallest = 1e-36f;

// The bits of a block's largest size: those of a float, infinity's or more where a value is not finite.
INLINE float largest_of(int32_t bits) {
    float size;
    memcpy(&size, &bits, sizeof size);
    return bits < 0x7f800000 ? size : NAN;
}

// A block without values. Its products are zero, or not a number if one of its activations is not finite.
INLINE void set_empty(ActivationBlock& to, float largest) {
    memset(&to, 0, sizeof to);
    to.scale = to.scaled_sum = to.scaled_half[0] = to.scaled_half[1] = 0 * largest;
}

INLINE void set_sums(ActivationBlock& to, float scale, int32_t first_half, int32_t second_half) {
    const int32_t sum = first_half + second_half;
    to.scale = scale;
    to.scaled_sum = scale * float(sum);
    to.less_8 = -8 * sum;
    to.less_128 = -128 * sum;
    to.less_32[0] = -32 * first_half;
    to.less_32[1] = -32 * second_half;
    to.scaled_half[0] = scale * float(first_half);
    to.scaled_half[1] = scale * float(second_half);
}
