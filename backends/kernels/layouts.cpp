// From the file's rows to panels. Each type says where a row's block keeps its parts; the rest is shared.
#include <cstring>

#include "formats.h"

namespace edgespec {
namespace {

// One row's block taken apart: what a panel holds, for up to 256 columns. Four columns make a quad.
struct Parts {
    uint8_t scales[2][2];  // f16 scale, f16 minimum
    uint8_t small[8][2];   // two small scales for each group
    uint32_t quads[64];    // unsigned weights, a byte each
};

constexpr uint32_t kLow = 0x0f0f0f0f;

uint32_t quad(const uint8_t* bytes, int i) {
    uint32_t value;
    memcpy(&value, bytes + 4 * i, 4);
    return value;
}

// `half` bytes: their low nibbles come first, their high ones behind them.
void split_nibbles(const uint8_t* bytes, uint32_t* quads, int half) {
    for (int i = 0; i < half / 4; i++) {
        quads[i] = quad(bytes, i) & kLow;
        quads[half / 4 + i] = quad(bytes, i) >> 4 & kLow;
    }
}

void take(Q4_0, const uint8_t* block, Parts& to) {
    memcpy(to.scales[0], block, 2);
    split_nibbles(block + 2, to.quads, 16);
}

void take(IQ4_NL, const uint8_t* block, Parts& to) { take(Q4_0(), block, to); }

void take(Q4_1, const uint8_t* block, Parts& to) {
    memcpy(to.scales, block, 4);
    split_nibbles(block + 4, to.quads, 16);
}

void take(Q8_0, const uint8_t* block, Parts& to) {
    memcpy(to.scales[0], block, 2);
    for (int i = 0; i < 8; i++) to.quads[i] = quad(block + 2, i) ^ 0x80808080;
}

// Scales and minimums of 6 bits: 4 groups in the low bits of 8 bytes, 4 more in what is left.
void take_small(const uint8_t* packed, Parts& to) {
    for (int g = 0; g < 4; g++) {
        to.small[g][0] = packed[g] & 63;
        to.small[g][1] = packed[g + 4] & 63;
        to.small[g + 4][0] = (packed[g + 8] & 15) | (packed[g] >> 6 << 4);
        to.small[g + 4][1] = (packed[g + 8] >> 4) | (packed[g + 4] >> 6 << 4);
    }
}

void take(Q4_K, const uint8_t* block, Parts& to) {
    memcpy(to.scales, block, 4);
    take_small(block + 4, to);
    for (int i = 0; i < 4; i++) split_nibbles(block + 16 + 32 * i, to.quads + 16 * i, 32);
}

void take(Q5_K, const uint8_t* block, Parts& to) {
    memcpy(to.scales, block, 4);
    take_small(block + 4, to);
    for (int i = 0; i < 4; i++) split_nibbles(block + 48 + 32 * i, to.quads + 16 * i, 32);
    for (int i = 0; i < 64; i++) to.quads[i] |= (quad(block + 16, i % 8) >> (i / 8) & 0x01010101) << 4;
}

void take(Q6_K, const uint8_t* block, Parts& to) {
    memcpy(to.scales[0], block + 208, 2);
    memcpy(to.small, block + 192, 16);
    for (int i = 0; i < 2; i++) split_nibbles(block + 64 * i, to.quads + 32 * i, 64);
    for (int i = 0; i < 64; i++)
        to.quads[i] |= (quad(block + 128, i / 32 * 8 + i % 8) >> (2 * (i % 32 / 8)) & 0x03030303) << 4;
}

void put_quad(uint32_t value, int row, uint8_t* plane) { memcpy(plane + 4 * row, &value, 4); }

// Quads of one row and group to the planes.
template <class F>
void put_group(const uint32_t* quads, int row, uint8_t* group) {
    if constexpr (F::type == Q8_0::type) {
        for (int i = 0; i < 8; i++) put_quad(quads[i], row, group + F::low + 64 * i);
        return;
    }
    for (int i = 0; i < 4; i++)
        put_quad((quads[i] & kLow) | (quads[i + 4] & kLow) << 4, row, group + F::low + 64 * i);
    if constexpr (F::type == Q5_K::type) {
        uint32_t bits = 0;
        for (int i = 0; i < 8; i++) bits |= (quads[i] >> 4 & 0x01010101) << i;
        put_quad(bits, row, group + F::high);
    }
    if constexpr (F::type == Q6_K::type) {
        uint32_t bits[2] = {0, 0};
        for (int i = 0; i < 8; i++) bits[i / 4] |= (quads[i] >> 4 & 0x03030303) << (2 * (i % 4));
        for (int i = 0; i < 2; i++) put_quad(bits[i], row, group + F::high + 64 * i);
    }
}

template <class F>
void put(const Parts& parts, int row, uint8_t* block) {
    for (int i = 0; i < F::header / 32; i++) memcpy(block + 32 * i + 2 * row, parts.scales[i], 2);
    for (int g = 0; g < F::groups; g++) {
        uint8_t* group = block + F::header + g * F::group_bytes;
        for (int i = 0; i < F::low / 16; i++) group[16 * i + row] = parts.small[g][i];
        put_group<F>(parts.quads + 8 * g, row, group);
    }
}

}  // namespace

template <class F>
void pack(const uint8_t* file, int64_t rows, int64_t k, uint8_t* panels) {
    int64_t blocks = k / F::columns;
    Parts parts;
    for (int64_t p = 0; p < rows / kRows; p++) {
        for (int64_t b = 0; b < blocks; b++) {
            uint8_t* to = panels + (p * blocks + b) * F::bytes;
            for (int r = 0; r < kRows; r++) {
                take(F(), file + ((p * kRows + r) * blocks + b) * F::file_bytes, parts);
                put<F>(parts, r, to);
            }
        }
    }
}

template void pack<Q4_0>(const uint8_t*, int64_t, int64_t, uint8_t*);
template void pack<Q4_1>(const uint8_t*, int64_t, int64_t, uint8_t*);
template void pack<Q8_0>(const uint8_t*, int64_t, int64_t, uint8_t*);
template void pack<Q4_K>(const uint8_t*, int64_t, int64_t, uint8_t*);
template void pack<Q5_K>(const uint8_t*, int64_t, int64_t, uint8_t*);
template void pack<Q6_K>(const uint8_t*, int64_t, int64_t, uint8_t*);
template void pack<IQ4_NL>(const uint8_t*, int64_t, int64_t, uint8_t*);

}  // namespace edgespec
