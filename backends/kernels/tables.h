// What each file of products hands to the table in products.cpp.
#pragma once

// What headers need that are included inside a namespace.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <utility>

#include "attention.h"
#include "formats.h"
#include "products.h"

namespace edgespec {

// How many bytes ahead weights are asked for, and into which cache: 3 the first, 2 the second.
struct Prefetch {
    int ahead, cache;
};

using Quantize = void (*)(const float* x, int64_t first_block, int64_t end_block, ActivationBlock* to);

// Products of the three types of floats, which no set has to rearrange.
struct FloatProducts {
    MultiplyFloats f32, f16, bf16;
};

constexpr int kFormats = AllTypes::count + 3;

struct InstructionSet {
    const char* name;
    bool (*runs_here)();
    Quantize quantize;
    const AttentionStages* attention;  // nullptr: llama.cpp's
    Format formats[kFormats];
};

// The row of the table for one type: `Multiply<F>::run` is its product.
template <template <class> class Multiply, class F>
constexpr Format row(const char* instructions) {
    const Traits& t = F::traits;
    return {t.type, t.name, instructions, t.columns, t.file_bytes, kRows, F::bytes, Multiply<F>::run, nullptr};
}

// The row for a type of floats.
constexpr Format float_row(Type type, size_t bytes, const char* name, const char* instructions, MultiplyFloats multiply) {
    return {type, name, instructions, 16, 16 * bytes, 1, 16 * bytes, nullptr, multiply};
}

template <template <class> class Multiply, class... F>
constexpr InstructionSet table_of(Types<F...>, const char* name, bool (*runs_here)(), Quantize quantize,
                                  const AttentionStages* attention, FloatProducts floats) {
    return {name,
            runs_here,
            quantize,
            attention,
            {row<Multiply, F>(name)..., float_row(GGML_TYPE_F32, 4, "F32", name, floats.f32),
             float_row(GGML_TYPE_F16, 2, "F16", name, floats.f16),
             float_row(GGML_TYPE_BF16, 2, "BF16", name, floats.bf16)}};
}

template <template <class> class Multiply>
constexpr InstructionSet table(const char* name, bool (*runs_here)(), Quantize quantize,
                               const AttentionStages* attention, FloatProducts floats) {
    return table_of<Multiply>(AllTypes(), name, runs_here, quantize, attention, floats);
}

extern const InstructionSet kScalar;
#if defined(__x86_64__)
extern const InstructionSet kAmx, kAvx512Vnni, kAvxVnni, kAvx2;
extern const AttentionStages kAttentionAvx512, kAttentionAvx2;
extern const FloatProducts kFloatsAvx512, kFloatsAvx2;
void quantize_avx2(const float* x, int64_t first_block, int64_t end_block, ActivationBlock* to);
void quantize_in_pairs(const float* x, int64_t first_block, int64_t end_block, ActivationBlock* to);  // see less_32
// What compilers' own __builtin_cpu_supports does not know, or not all of them.
bool has_f16c();
bool has_avx_vnni();
bool has_amx();
#elif defined(__aarch64__)
extern const InstructionSet kNeonI8mm, kNeonDotprod;
extern const AttentionStages kAttentionNeon;
extern const FloatProducts kFloatsNeon;
bool has_dotprod();
bool has_i8mm();
#endif

}  // namespace edgespec
