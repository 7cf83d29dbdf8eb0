// Single values of panels, for code that is read by people and need not be fast.
#pragma once

#include <cmath>
#include <cstring>

#include "formats.h"

namespace edgespec {

inline float half(const uint8_t* at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31   ? (fraction ? NAN : INFINITY)
                  : exponent == 0 ? std::ldexp(float(fraction), -24)
                                  : std::ldexp(float(1024 + fraction), exponent - 25);
    return bits >> 15 ? -value : value;
}

inline float bf16(const uint8_t* at) {
    uint32_t bits = uint32_t(at[0]) << 16 | uint32_t(at[1]) << 24;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Scales of 8 bits. One of e8m0 is half of what ggml calls so, as its weights are twice their value; those below
// 2^-126 are zero. One of e4m3 is as large as kSmallFloats says.
inline float e8m0(uint8_t value) { return value > 1 ? std::ldexp(1.0f, value - 128) : 0; }
inline float e4m3(uint8_t value) {
    const uint8_t bits[2] = {uint8_t(value << 7), uint8_t(value >> 1)};
    return half(bits);
}

// The signed weight of one row and column of a group.
template <class F>
int weight(const uint8_t* group, int row, int column) {
    constexpr Traits t = F::traits;
    const int quad = column / 4, at = 4 * row + column % 4;
    const uint8_t *low = group + F::low + at, *high = group + F::high + at;
    int value = t.low_bits == 8   ? low[64 * quad]
                : t.low_bits == 4 ? low[64 * (quad % 4)] >> (quad / 4 * 4) & 15
                                  : low[64 * (quad / 4)] >> (quad % 4 * 2) & 3;
    if (t.high_bits == 1) value |= (high[0] >> quad & 1) << t.low_bits;
    if (t.high_bits == 2) value |= (high[64 * (quad / 4)] >> (quad % 4 * 2) & 3) << t.low_bits;
    return (t.table_bits ? t.table[value] : value) - t.offset;
}

// The scale of a block and group, and the one of half a group.
template <class F>
float scale_of(const uint8_t* block, const uint8_t* group, int row) {
    constexpr Traits t = F::traits;
    if (t.scale == Scale::none) return kSmallFloats;
    if (t.scale == Scale::e8m0) return e8m0(block[row]);
    if (t.small == Small::one) return half(block + 2 * row) * float(int8_t(group[row]));
    return half(block + 2 * row) * (t.small == Small::with_minimum ? float(group[row]) : 1);
}

template <class F>
float small_of(const uint8_t* group, int row, int of_half) {
    const uint8_t value = group[kRows * of_half + row];
    if (F::traits.small == Small::halves_e4m3) return e4m3(value);
    return F::traits.small == Small::halves ? float(int8_t(value)) : float(value & 15);
}

// What is added to the weights of half a group.
template <class F>
float minimum_of(const uint8_t* block, const uint8_t* group, int row, int of_half) {
    const float minimum = half(block + F::minimum + 2 * row);
    if (F::traits.small == Small::with_minimum) return minimum * -float(group[kRows + row]);
    if (F::has_halves) return minimum * -float(group[kRows * of_half + row] >> 4);
    return minimum;
}

}  // namespace edgespec
