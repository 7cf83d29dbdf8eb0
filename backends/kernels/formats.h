// The layouts: how 16 rows of each type lie in a panel. All types share the order of columns.
//
// A group is 32 columns of 16 rows. Columns go in quads: for quad i a plane holds 4 bytes for each row
// (64 bytes). Nibbles: the low ones of plane i are quad i, the high ones quad i + 4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace edgespec {

constexpr int kRows = 16;
constexpr int kNibbles = 4 * 64;

// Offsets of a panel block: a header of f16 scales, then groups of [small scales, nibbles or bytes, high bits].
template <int Type, int Columns, size_t FileBytes, int Header, int Scales, int Low, int High>
struct Layout {
    static constexpr int type = Type;
    static constexpr int columns = Columns;
    static constexpr int groups = Columns / 32;
    static constexpr size_t file_bytes = FileBytes;
    static constexpr int header = Header;
    static constexpr int low = Scales;
    static constexpr int high = Scales + Low;
    static constexpr int group_bytes = Scales + Low + High;
    static constexpr size_t bytes = Header + groups * group_bytes;
    static_assert(bytes * 100 <= FileBytes * kRows * 105, "not more than 5% above the file");
};

struct Q4_0 : Layout<2, 32, 18, 32, 0, kNibbles, 0> { static constexpr const char* name = "Q4_0"; };
struct Q4_1 : Layout<3, 32, 20, 64, 0, kNibbles, 0> { static constexpr const char* name = "Q4_1"; };
struct Q8_0 : Layout<8, 32, 34, 32, 0, 512, 0> { static constexpr const char* name = "Q8_0"; };
struct Q4_K : Layout<12, 256, 144, 64, 32, kNibbles, 0> { static constexpr const char* name = "Q4_K"; };
struct Q5_K : Layout<13, 256, 176, 64, 32, kNibbles, 64> { static constexpr const char* name = "Q5_K"; };
struct Q6_K : Layout<14, 256, 210, 32, 32, kNibbles, 128> { static constexpr const char* name = "Q6_K"; };
struct IQ4_NL : Layout<20, 32, 18, 32, 0, kNibbles, 0> { static constexpr const char* name = "IQ4_NL"; };

// ggml's values of IQ4_NL, with 128 added.
alignas(16) constexpr uint8_t kIq4nl[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                            129, 141, 153, 166, 181, 197, 217, 241};

template <class F>
void pack(const uint8_t* file, int64_t rows, int64_t k, uint8_t* panels);

// Of weights that stay floats, `bytes` each: the rows of the file as they are.
template <int bytes>
void keep_rows(const uint8_t* file, int64_t rows, int64_t k, uint8_t* panels) {
    memcpy(panels, file, size_t(rows * k) * bytes);
}

}  // namespace edgespec
