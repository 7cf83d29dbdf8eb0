// Single rows of panels as floats: what looking a token up in an embedding table needs.
#include "panel_values.h"
#include "products.h"

namespace edgespec {
namespace {

// Values as ggml converts them: scale x small scale x weight, less the minimum.
template <class F>
void row_values(const uint8_t* panels, int64_t row, int64_t k, float* values) {
    int64_t blocks = k / F::columns;
    int at = int(row % kRows);
    const uint8_t* block = panels + row / kRows * blocks * int64_t(F::bytes);
    for (int64_t b = 0; b < blocks; b++, block += F::bytes) {
        for (int column = 0; column < F::columns; column++) {
            const uint8_t* group = block + F::header + column / 32 * F::group_bytes;
            float scale = half(block + 2 * at), minimum = F::header == 64 ? half(block + 32 + 2 * at) : 0;
            if (F::type == Q6_K::type) scale *= float(int8_t(group[column % 32 / 16 * 16 + at]));
            if (F::type == Q4_K::type || F::type == Q5_K::type) {
                scale *= float(group[at]);
                minimum *= -float(group[16 + at]);
            }
            *values++ = scale * float(weight<F>(group, at, column % 32)) + minimum;
        }
    }
}

// Of weights of two bytes that stayed as they were.
void float_values(float (*value)(const uint8_t*), const uint8_t* rows, int64_t row, int64_t k, float* values) {
    for (int64_t c = 0; c < k; c++) values[c] = value(rows + 2 * (row * k + c));
}

}  // namespace

void unpack_row(const Format& format, const uint8_t* panels, int64_t row, int64_t k, float* values) {
    switch (format.type) {
        case Q4_0::type: return row_values<Q4_0>(panels, row, k, values);
        case Q4_1::type: return row_values<Q4_1>(panels, row, k, values);
        case Q8_0::type: return row_values<Q8_0>(panels, row, k, values);
        case Q4_K::type: return row_values<Q4_K>(panels, row, k, values);
        case Q5_K::type: return row_values<Q5_K>(panels, row, k, values);
        case Q6_K::type: return row_values<Q6_K>(panels, row, k, values);
        case IQ4_NL::type: return row_values<IQ4_NL>(panels, row, k, values);
        case 0: memcpy(values, panels + row * k * 4, size_t(k) * 4); return;
        case 1: return float_values(half, panels, row, k, values);
        case 30: return float_values(bf16, panels, row, k, values);
    }
}

}  // namespace edgespec
