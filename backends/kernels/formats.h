// The layouts: how 16 rows of each type lie in a panel. All types share the order of columns.
//
// A group is 32 columns of 16 rows. Columns go in quads: for quad i a plane holds 4 bytes for each row
// (64 bytes). Nibbles: the low ones of plane i are quad i, the high ones quad i + 4. Pairs of bits: plane i has
// quads 4 i to 4 i + 3, from the lowest bits on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace edgespec {

constexpr int kRows = 16;
constexpr float kSmallFloats = 128;  // what small scales of 8 bits are to be multiplied by, see e4m3 of the vectors

// ggml's enumeration.
enum Type : int {
    GGML_TYPE_F32 = 0,
    GGML_TYPE_F16 = 1,
    GGML_TYPE_Q4_0 = 2,
    GGML_TYPE_Q4_1 = 3,
    GGML_TYPE_Q5_0 = 6,
    GGML_TYPE_Q5_1 = 7,
    GGML_TYPE_Q8_0 = 8,
    GGML_TYPE_Q2_K = 10,
    GGML_TYPE_Q3_K = 11,
    GGML_TYPE_Q4_K = 12,
    GGML_TYPE_Q5_K = 13,
    GGML_TYPE_Q6_K = 14,
    GGML_TYPE_IQ4_NL = 20,
    GGML_TYPE_IQ4_XS = 23,
    GGML_TYPE_BF16 = 30,
    GGML_TYPE_TQ2_0 = 35,
    GGML_TYPE_MXFP4 = 39,
    GGML_TYPE_NVFP4 = 40,
    GGML_TYPE_Q2_0 = 42,
};

// A block's scale in the header of a panel.
enum class Scale { f16, e8m0, none };

// Smaller scales of each group: none, a signed one, an unsigned one with a minimum; or one for each half of the group:
// signed, of four bits with a minimum of four, or floats of 8 bits without a sign.
enum class Small { none, one, with_minimum, halves, halves_with_minimum, halves_e4m3 };

struct Traits {
    Type type;
    const char* name;
    int columns;  // of a block
    size_t file_bytes;
    int low_bits, high_bits;  // of a stored weight
    int offset;               // stored weights, or those of the table, are so much too large
    Scale scale = Scale::f16;
    bool has_minimum = false;
    Small small = Small::none;
    const uint8_t* table = nullptr;  // of 16 weights
    int table_bits = 0;              // of the largest one
};

// ggml's values of IQ4_NL, with 128 added, and twice those of FP4, with 16 added.
alignas(16) inline constexpr uint8_t kIq4nl[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                            129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) inline constexpr uint8_t kFp4[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

inline constexpr Traits kQ4_0 = {GGML_TYPE_Q4_0, "Q4_0", 32, 18, 4, 0, 8};
inline constexpr Traits kQ4_1 = {GGML_TYPE_Q4_1, "Q4_1", 32, 20, 4, 0, 0, Scale::f16, true};
inline constexpr Traits kQ5_0 = {GGML_TYPE_Q5_0, "Q5_0", 32, 22, 4, 1, 16};
inline constexpr Traits kQ5_1 = {GGML_TYPE_Q5_1, "Q5_1", 32, 24, 4, 1, 0, Scale::f16, true};
inline constexpr Traits kQ2_0 = {GGML_TYPE_Q2_0, "Q2_0", 64, 18, 2, 0, 1};
inline constexpr Traits kQ8_0 = {GGML_TYPE_Q8_0, "Q8_0", 32, 34, 8, 0, 128};
inline constexpr Traits kQ2_K = {GGML_TYPE_Q2_K, "Q2_K", 256, 84, 2, 0, 0, Scale::f16, true, Small::halves_with_minimum};
inline constexpr Traits kQ3_K = {GGML_TYPE_Q3_K, "Q3_K", 256, 110, 2, 1, 4, Scale::f16, false, Small::halves};
inline constexpr Traits kQ4_K = {GGML_TYPE_Q4_K, "Q4_K", 256, 144, 4, 0, 0, Scale::f16, true, Small::with_minimum};
inline constexpr Traits kQ5_K = {GGML_TYPE_Q5_K, "Q5_K", 256, 176, 4, 1, 0, Scale::f16, true, Small::with_minimum};
inline constexpr Traits kQ6_K = {GGML_TYPE_Q6_K, "Q6_K", 256, 210, 4, 2, 32, Scale::f16, false, Small::halves};
inline constexpr Traits kIQ4_NL = {GGML_TYPE_IQ4_NL, "IQ4_NL", 32, 18, 4, 0, 128, Scale::f16, false, Small::none, kIq4nl, 8};
inline constexpr Traits kIQ4_XS = {GGML_TYPE_IQ4_XS, "IQ4_XS", 256, 136, 4, 0, 128, Scale::f16, false, Small::one, kIq4nl, 8};
inline constexpr Traits kTQ2_0 = {GGML_TYPE_TQ2_0, "TQ2_0", 256, 66, 2, 0, 1};
inline constexpr Traits kMXFP4 = {GGML_TYPE_MXFP4, "MXFP4", 32, 17, 4, 0, 16, Scale::e8m0, false, Small::none, kFp4, 5};
inline constexpr Traits kNVFP4 = {GGML_TYPE_NVFP4, "NVFP4", 64, 36, 4, 0, 16, Scale::none, false, Small::halves_e4m3, kFp4, 5};

// Offsets of a panel block: a header of scales, then groups of [small scales, planes of low bits, planes of high bits].
template <const Traits& T>
struct Layout {
    static constexpr const Traits& traits = T;
    static constexpr int columns = T.columns, groups = T.columns / 32;
    static constexpr bool has_halves = T.small >= Small::halves;  // with a scale each
    static constexpr int small_bytes = T.small == Small::none ? 0 : T.small == Small::one ? kRows : 2 * kRows;
    static constexpr int minimum = 2 * kRows;  // where a block's minimums are
    static constexpr int header =
        kRows * ((T.scale == Scale::f16 ? 2 : T.scale == Scale::e8m0 ? 1 : 0) + (T.has_minimum ? 2 : 0));
    static constexpr int low = small_bytes;
    static constexpr int high = low + 64 * T.low_bits;
    static constexpr int group_bytes = high + 64 * T.high_bits;
    static constexpr size_t bytes = header + groups * group_bytes;
    // The bits of a weight as it is multiplied. Those of 8 bits need more care with signs.
    static constexpr int bits = T.table_bits ? T.table_bits : T.low_bits + T.high_bits;
    static constexpr bool is_wide = bits == 8;
    static_assert(bytes * 100 <= T.file_bytes * kRows * 105, "not more than 5% above the file");
};

using Q4_0 = Layout<kQ4_0>;
using Q4_1 = Layout<kQ4_1>;
using Q5_0 = Layout<kQ5_0>;
using Q5_1 = Layout<kQ5_1>;
using Q2_0 = Layout<kQ2_0>;
using Q8_0 = Layout<kQ8_0>;
using Q2_K = Layout<kQ2_K>;
using Q3_K = Layout<kQ3_K>;
using Q4_K = Layout<kQ4_K>;
using Q5_K = Layout<kQ5_K>;
using Q6_K = Layout<kQ6_K>;
using IQ4_NL = Layout<kIQ4_NL>;
using IQ4_XS = Layout<kIQ4_XS>;
using TQ2_0 = Layout<kTQ2_0>;
using MXFP4 = Layout<kMXFP4>;
using NVFP4 = Layout<kNVFP4>;

template <class... F>
struct Types {
    static constexpr int count = sizeof...(F);
};
using AllTypes = Types<Q2_0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, TQ2_0, MXFP4, NVFP4>;

// Which of ActivationBlock's sums takes the offset of a type off, and by how many bits it is shifted to the right.
constexpr int shift_of(int sum_of, int offset) { return sum_of == offset ? 0 : 1 + shift_of(sum_of / 2, offset); }

}  // namespace edgespec
