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

// The signed weight of one row and column of a group.
template <class F>
int weight(const uint8_t* group, int row, int column) {
    int quad = column / 4, at = 4 * row + column % 4;
    if (F::type == Q8_0::type) return group[F::low + 64 * quad + at] - 128;
    int low = group[F::low + 64 * (quad % 4) + at] >> (quad / 4 * 4) & 15;
    if (F::type == Q4_0::type) return low - 8;
    if (F::type == IQ4_NL::type) return kIq4nl[low] - 128;
    if (F::type == Q5_K::type) return low | (group[F::high + at] >> quad & 1) << 4;
    if (F::type == Q6_K::type)
        return (low | (group[F::high + 64 * (quad / 4) + at] >> (quad % 4 * 2) & 3) << 4) - 32;
    return low;
}

}  // namespace edgespec
