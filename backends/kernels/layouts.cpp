// From the file's rows to panels. Each type says where a row's block keeps its parts; the rest is shared.
#include <cstring>

#include "formats.h"
#include "products.h"

namespace edgespec {
namespace {

// One row's block taken apart: what a panel holds, for up to 256 columns. Four columns make a quad.
struct Parts {
    uint8_t scales[2][2];  // f16 scale, or e8m0 in its first byte; f16 minimum
    uint8_t small[8][2];   // two small scales for each group
    uint32_t quads[64];    // unsigned weights, a byte each
};

constexpr uint32_t kNibbles = 0x0f0f0f0f, kPairs = 0x03030303, kBits = 0x01010101;

uint32_t quad(const uint8_t* bytes, int i) {
    uint32_t value;
    memcpy(&value, bytes + 4 * i, 4);
    return value;
}

// `half` bytes: their low nibbles come first, their high ones behind them.
void split_nibbles(const uint8_t* bytes, uint32_t* quads, int half) {
    for (int i = 0; i < half / 4; i++) {
        quads[i] = quad(bytes, i) & kNibbles;
        quads[half / 4 + i] = quad(bytes, i) >> 4 & kNibbles;
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

// The fifth bits of 32 weights: bit i is that of weight i.
void take_fifth_bits(const uint8_t* bits, uint32_t* quads) {
    for (int i = 0; i < 32; i++) quads[i / 4] |= uint32_t(bits[i / 8] >> i % 8 & 1) << (8 * (i % 4) + 4);
}

void take(Q5_0, const uint8_t* block, Parts& to) {
    memcpy(to.scales[0], block, 2);
    split_nibbles(block + 6, to.quads, 16);
    take_fifth_bits(block + 2, to.quads);
}

void take(Q5_1, const uint8_t* block, Parts& to) {
    memcpy(to.scales, block, 4);
    split_nibbles(block + 8, to.quads, 16);
    take_fifth_bits(block + 4, to.quads);
}

void take(MXFP4, const uint8_t* block, Parts& to) {
    to.scales[0][0] = block[0];
    split_nibbles(block + 1, to.quads, 16);
}

// A quad in each byte.
void take(Q2_0, const uint8_t* block, Parts& to) {
    memcpy(to.scales[0], block, 2);
    for (int i = 0; i < 16; i++) {
        const uint32_t four = block[2 + i];
        to.quads[i] = (four | four << 6 | four << 12 | four << 18) & kPairs;
    }
}

// ggml knows no sign of these scales, and takes the largest number for zero.
void take(NVFP4, const uint8_t* block, Parts& to) {
    for (int i = 0; i < 4; i++) {
        to.small[i / 2][i % 2] = block[i] == 127 ? 0 : block[i] & 127;
        split_nibbles(block + 4 + 8 * i, to.quads + 4 * i, 8);
    }
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

// Pairs of bits: 32 bytes hold 128 weights, of which each 32 have two bits of every byte.
void split_pairs(const uint8_t* bytes, uint32_t* quads) {
    for (int i = 0; i < 64; i++) quads[i] = quad(bytes, i / 32 * 8 + i % 8) >> (2 * (i % 32 / 8)) & kPairs;
}

void take(Q2_K, const uint8_t* block, Parts& to) {
    memcpy(to.scales, block + 80, 4);
    memcpy(to.small, block, 16);
    split_pairs(block + 16, to.quads);
}

// Scales of 6 bits: 4 in the nibbles of 8 bytes, 2 more in those behind.
void take(Q3_K, const uint8_t* block, Parts& to) {
    const uint8_t* packed = block + 96;
    memcpy(to.scales[0], block + 108, 2);
    for (int i = 0; i < 16; i++) {
        const int low = packed[i % 8] >> (i / 8 * 4) & 15, high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
        to.small[i / 2][i % 2] = uint8_t((low | high << 4) - 32);
    }
    split_pairs(block + 32, to.quads);
    for (int i = 0; i < 64; i++) to.quads[i] |= (quad(block, i % 8) >> (i / 8) & kBits) << 2;
}

void take(TQ2_0, const uint8_t* block, Parts& to) {
    memcpy(to.scales[0], block + 64, 2);
    split_pairs(block, to.quads);
}

void take(IQ4_XS, const uint8_t* block, Parts& to) {
    const int high = block[2] | block[3] << 8;
    memcpy(to.scales[0], block, 2);
    for (int g = 0; g < 8; g++) {
        to.small[g][0] = uint8_t(((block[4 + g / 2] >> (g % 2 * 4) & 15) | (high >> (2 * g) & 3) << 4) - 32);
        split_nibbles(block + 8 + 16 * g, to.quads + 8 * g, 16);
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
    for (int i = 0; i < 64; i++) to.quads[i] |= (quad(block + 16, i % 8) >> (i / 8) & kBits) << 4;
}

void take(Q6_K, const uint8_t* block, Parts& to) {
    memcpy(to.scales[0], block + 208, 2);
    memcpy(to.small, block + 192, 16);
    for (int i = 0; i < 2; i++) split_nibbles(block + 64 * i, to.quads + 32 * i, 64);
    for (int i = 0; i < 64; i++)
        to.quads[i] |= (quad(block + 128, i / 32 * 8 + i % 8) >> (2 * (i % 32 / 8)) & kPairs) << 4;
}

void put_quad(uint32_t value, int row, uint8_t* plane) { memcpy(plane + 4 * row, &value, 4); }

// Quads of one row and group to the planes.
template <class F>
void put_group(const uint32_t* quads, int row, uint8_t* group) {
    constexpr Traits t = F::traits;
    constexpr int planes = t.low_bits, each = 8 / planes;  // quads of a plane
    for (int i = 0; i < planes; i++) {
        uint32_t plane = 0;
        for (int j = 0; j < each; j++) {
            const int at = planes == 4 ? i + 4 * j : each * i + j;
            plane |= (quads[at] & (planes == 8 ? ~0u : planes == 4 ? kNibbles : kPairs)) << (j * t.low_bits % 32);
        }
        put_quad(plane, row, group + F::low + 64 * i);
    }
    for (int i = 0; i < t.high_bits; i++) {
        uint32_t plane = 0;
        for (int j = 0; j < 8 / t.high_bits; j++)
            plane |= (quads[8 / t.high_bits * i + j] >> t.low_bits & (t.high_bits == 1 ? kBits : kPairs)) << (j * t.high_bits);
        put_quad(plane, row, group + F::high + 64 * i);
    }
}

template <class F>
void put(const Parts& parts, int row, uint8_t* block) {
    if (F::traits.scale == Scale::f16) memcpy(block + 2 * row, parts.scales[0], 2);
    if (F::traits.scale == Scale::e8m0) block[row] = parts.scales[0][0];
    if (F::traits.has_minimum) memcpy(block + F::minimum + 2 * row, parts.scales[1], 2);
    for (int g = 0; g < F::groups; g++) {
        uint8_t* group = block + F::header + g * F::group_bytes;
        for (int i = 0; i < F::small_bytes / kRows; i++) group[kRows * i + row] = parts.small[g][i];
        put_group<F>(parts.quads + 8 * g, row, group);
    }
}

template <class F>
void pack_as(const uint8_t* file, int64_t rows, int64_t k, uint8_t* panels) {
    const int64_t blocks = k / F::columns;
    Parts parts = {};
    for (int64_t p = 0; p < rows / kRows; p++) {
        for (int64_t b = 0; b < blocks; b++) {
            uint8_t* to = panels + (p * blocks + b) * F::bytes;
            for (int r = 0; r < kRows; r++) {
                take(F(), file + ((p * kRows + r) * blocks + b) * F::traits.file_bytes, parts);
                put<F>(parts, r, to);
            }
        }
    }
}

using Pack = void (*)(const uint8_t*, int64_t, int64_t, uint8_t*);

// By a pointer: GCC 12 drops calls out of a chain of conditions.
template <class... F>
Pack pack_of(Types<F...>, int type) {
    Pack found = nullptr;
    ((F::traits.type == type ? void(found = pack_as<F>) : void()), ...);
    return found;
}

}  // namespace

void pack(const Format& format, const uint8_t* file, int64_t rows, int64_t k, uint8_t* panels) {
    if (format.multiply_floats)
        memcpy(panels, file, size_t(rows) * format.row_bytes(k));
    else
        pack_of(AllTypes(), format.type)(file, rows, k, panels);
}

}  // namespace edgespec
