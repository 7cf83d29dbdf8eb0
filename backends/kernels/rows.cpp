// Single rows of panels as floats: what looking a token up in an embedding table needs.
#include "panel_values.h"
#include "products.h"

namespace edgespec {
namespace {

// Values as ggml converts them: scale x small scale x weight, and the minimum.
template <class F>
void row_values(const uint8_t* panels, int64_t row, int64_t k, float* values) {
    const int64_t blocks = k / F::columns;
    const int at = int(row % kRows);
    const uint8_t* block = panels + row / kRows * blocks * int64_t(F::bytes);
    for (int64_t b = 0; b < blocks; b++, block += F::bytes) {
        for (int column = 0; column < F::columns; column++) {
            const uint8_t* group = block + F::header + column / 32 * F::group_bytes;
            const int in_half = column % 32 / 16;
            float scale = scale_of<F>(block, group, at);
            if (F::has_halves) scale *= small_of<F>(group, at, in_half);
            const float minimum = F::traits.has_minimum ? minimum_of<F>(block, group, at, in_half) : 0;
            *values++ = scale * float(weight<F>(group, at, column % 32)) + minimum;
        }
    }
}

using Unpack = void (*)(const uint8_t*, int64_t, int64_t, float*);

template <class... F>
Unpack unpack_of(Types<F...>, int type) {
    Unpack found = nullptr;
    ((F::traits.type == type ? void(found = row_values<F>) : void()), ...);
    return found;
}

// Of weights of two bytes that stayed as they were.
void float_values(float (*value)(const uint8_t*), const uint8_t* rows, int64_t row, int64_t k, float* values) {
    for (int64_t c = 0; c < k; c++) values[c] = value(rows + 2 * (row * k + c));
}

}  // namespace

void unpack_row(const Format& format, const uint8_t* panels, int64_t row, int64_t k, float* values) {
    switch (format.type) {
        case GGML_TYPE_F32: memcpy(values, panels + row * k * 4, size_t(k) * 4); return;
        case GGML_TYPE_F16: return float_values(half, panels, row, k, values);
        case GGML_TYPE_BF16: return float_values(bf16, panels, row, k, values);
        default: unpack_of(AllTypes(), format.type)(panels, row, k, values);
    }
}

}  // namespace edgespec
