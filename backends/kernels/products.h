// Products of weights with a few columns of activations: what the glue to ggml may call.
// Nothing here knows ggml beyond the bytes of its weight blocks.
//
// Promise: a row's result depends on its weights and its column alone. The float operations and their
// order are the same for every number of columns, every split of panels and every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgespec {

// 32 activations of one column, in one cache line. The sums start the integer accumulators: weights are
// stored unsigned, and what was added to them comes off here.
struct alignas(64) ActivationBlock {
    int8_t values[32];
    float scale;
    float scaled_sum;    // scale x sum, for formats with a minimum
    int32_t less_8;      // -8 x sum
    int32_t less_128;    // -128 x sum
    int32_t less_32[2];  // -32 x sum of each half; of AVX2 two numbers of 16 bits: of each quad's first two, and last
    float scaled_half[2];  // scale x sum of each half
};

// n columns of k activations. A view: the caller owns the memory.
struct Activations {
    ActivationBlock* blocks;
    int64_t stride;  // blocks from one column to the next
};

// Bytes that n columns of k activations take. The memory must lie at a multiple of 64.
size_t activation_bytes(int64_t k, int64_t n);
Activations activations_at(void* memory, int64_t k);

// Quantizes columns [first, end) of x; `stride` floats from one column to the next. Threads share columns.
// For one column they may share its blocks: see first_block and end_block.
void quantize(const float* x, int64_t stride, int64_t first, int64_t end, int64_t k, Activations to);
void quantize_blocks(const float* x, int64_t first_block, int64_t end_block, ActivationBlock* to);

// Columns of x are `x_stride` floats apart.
using MultiplyFloats = void (*)(const uint8_t* rows, int64_t first, int64_t end, int64_t k, const float* x,
                                int64_t x_stride, int64_t n, float* out, int64_t out_stride);

// One row of the table: what multiplies one type of weights on this processor.
struct Format {
    int type;              // ggml_type
    const char* name;      // "Q4_0"
    const char* instructions;
    int64_t block_columns;
    size_t file_block_bytes;
    int64_t panel_rows;
    size_t panel_block_bytes;  // one block of every row of a panel

    size_t panel_bytes(int64_t k) const { return size_t(k / block_columns) * panel_block_bytes; }
    size_t row_bytes(int64_t k) const { return size_t(k / block_columns) * file_block_bytes; }

    // out[column * out_stride + row] for the rows of panels [first, end). `panels` and `out` are those of
    // panel 0 and row 0. nullptr for types of floats:
    void (*multiply)(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n,
                     float* out, int64_t out_stride);

    // The same for weights that stay floats: a panel is a row of the file, and columns are not quantized.
    MultiplyFloats multiply_floats;
};

// Rearranges `rows` rows of the file (a multiple of panel_rows) to panels.
void pack(const Format& format, const uint8_t* file, int64_t rows, int64_t k, uint8_t* panels);

// Values [k] of one row of panels, as floats.
void unpack_row(const Format& format, const uint8_t* panels, int64_t row, int64_t k, float* values);

// The product for this processor, or nullptr for what has none (odd sizes too).
const Format* find(int ggml_type, int64_t rows, int64_t k);

// Instruction sets by name, best first; EDGESPEC_KERNELS_ISA=avx2 or choose("avx2") hides better ones.
// False where this processor or this build lacks the set. Not while products run.
bool choose(const char* instructions);
const char* chosen();

}  // namespace edgespec
