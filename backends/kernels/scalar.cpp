// The scalar reference: the oracle of all tests, one value after the other, without regard to speed.
// It decodes single values from the panels, so it shares no code with the products.
#include <cmath>
#include <cstring>

#include "panel_values.h"
#include "tables.h"

namespace edgespec {
namespace {

template <class F>
int32_t dot(const uint8_t* group, int row, const int8_t* x, int first, int end) {
    int32_t sum = 0;
    for (int c = first; c < end; c++) sum += weight<F>(group, row, c) * x[c];
    return sum;
}

// One group of one row. Every other product does these float operations in this order.
template <class F>
float add_group(float sum, const uint8_t* block, int g, int row, const ActivationBlock& x) {
    const uint8_t* group = block + F::header + g * F::group_bytes;
    float product = float(dot<F>(group, row, x.values, 0, 32));
    if (F::has_halves)
        product = std::fma(float(dot<F>(group, row, x.values, 16, 32)), small_of<F>(group, row, 1),
                           float(dot<F>(group, row, x.values, 0, 16)) * small_of<F>(group, row, 0));
    sum = std::fma(product, scale_of<F>(block, group, row) * x.scale, sum);
    if (!F::traits.has_minimum) return sum;
    if (!F::has_halves) return std::fma(minimum_of<F>(block, group, row, 0), x.scaled_sum, sum);
    for (int half = 0; half < 2; half++) sum = std::fma(minimum_of<F>(block, group, row, half), x.scaled_half[half], sum);
    return sum;
}

template <class F>
float row_product(const uint8_t* panel, int row, int64_t blocks, const ActivationBlock* x) {
    float sum = 0;
    for (int64_t b = 0; b < blocks; b++)
        for (int g = 0; g < F::groups; g++)
            sum = add_group<F>(sum, panel + b * F::bytes, g, row, x[b * F::groups + g]);
    return sum;
}

template <class F>
struct Multiply {
    static void run(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n,
                    float* out, int64_t out_stride) {
        int64_t blocks = k / F::columns;
        for (int64_t r = first * kRows; r < end * kRows; r++)
            for (int64_t t = 0; t < n; t++)
                out[t * out_stride + r] = row_product<F>(panels + r / kRows * blocks * F::bytes, int(r % kRows),
                                                         blocks, x.blocks + t * x.stride);
    }
};

float f32(const uint8_t* at) {
    float value;
    memcpy(&value, at, 4);
    return value;
}

// One row by one column: 16 sums, of every 16th product each, which are then added by halves.
template <float (*value)(const uint8_t*), int bytes>
float float_product(const uint8_t* row, int64_t k, const float* x) {
    float sums[16] = {};
    for (int64_t c = 0; c < k; c++) sums[c % 16] = std::fma(value(row + c * bytes), x[c], sums[c % 16]);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) sums[i] = sums[i] + sums[i + width];
    return sums[0];
}

template <float (*value)(const uint8_t*), int bytes>
void multiply_floats(const uint8_t* rows, int64_t first, int64_t end, int64_t k, const float* x, int64_t x_stride,
                     int64_t n, float* out, int64_t out_stride) {
    for (int64_t r = first; r < end; r++)
        for (int64_t t = 0; t < n; t++)
            out[t * out_stride + r] = float_product<value, bytes>(rows + r * k * bytes, k, x + t * x_stride);
}

constexpr FloatProducts kFloats = {multiply_floats<f32, 4>, multiply_floats<half, 2>, multiply_floats<bf16, 2>};

// The largest size of a block's activations, or NaN if one of them is not finite.
float largest(const float* x) {
    float max = 0;
    for (int i = 0; i < 32; i++) {
        if (!std::isfinite(x[i])) return NAN;
        max = std::fmax(max, std::fabs(x[i]));
    }
    return max;
}

// Blocks whose largest value is below 1e-36 count as zero. Those that are not finite have a scale of NaN.
void quantize_block(const float* x, ActivationBlock& to) {
    float max = largest(x);
    bool counts = max >= 1e-36f;
    int32_t sums[2] = {0, 0};
    for (int i = 0; i < 32; i++) {
        to.values[i] = counts ? int8_t(std::nearbyint(x[i] * (127 / max))) : 0;
        sums[i / 16] += to.values[i];
    }
    to.scale = counts ? max / 127 : 0 * max;
    to.scaled_sum = to.scale * float(sums[0] + sums[1]);
    to.less_8 = -8 * (sums[0] + sums[1]);
    to.less_128 = -128 * (sums[0] + sums[1]);
    to.less_32[0] = -32 * sums[0];
    to.less_32[1] = -32 * sums[1];
    for (int half = 0; half < 2; half++) to.scaled_half[half] = to.scale * float(sums[half]);
}

void quantize_scalar(const float* x, int64_t first, int64_t end, ActivationBlock* to) {
    for (int64_t b = first; b < end; b++) quantize_block(x + 32 * b, to[b]);
}

}  // namespace

const InstructionSet kScalar = table<Multiply>("scalar", [] { return true; }, quantize_scalar, nullptr, kFloats);

}  // namespace edgespec
