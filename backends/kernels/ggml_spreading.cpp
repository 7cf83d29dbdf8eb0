// ggml finds the place of every row anew, with two divisions: for 49,152 rows of one value that takes longer than
// all else in a step of a small head (`llama.cpp: src/models/eagle3.cpp`).
#include "ggml_spreading.h"

#include <algorithm>
#include <cstring>

namespace edgespec {
namespace {

using ggml::ComputeParams;
using ggml::Tensor;

int64_t num_values(const Tensor* x) { return x->ne[0] * x->ne[1] * x->ne[2] * x->ne[3]; }

// One value in each row, and no gaps.
bool is_dense(const Tensor* x, int type, size_t size) {
    return x->type == type && x->ne[0] == 1 && x->nb[0] == size && x->nb[1] == size &&
           x->nb[2] == size * size_t(x->ne[1]) && x->ne[3] == 1;
}

// A thread's share of so many rows, as ggml shares them: if another user of the library computes while the kernels
// are made known, some threads of one operation may be ggml's.
struct Rows {
    int64_t first, end;

    Rows(int64_t count, const ComputeParams* params) {
        const int64_t each = (count + params->nth - 1) / params->nth;
        first = std::min(each * params->ith, count), end = std::min(first + each, count);
    }
};

void fill(const ComputeParams* params, Tensor* op) {
    float value, *values = static_cast<float*>(op->data);
    memcpy(&value, op->op_params, sizeof value);
    const Rows rows(num_values(op), params);
    std::fill(values + rows.first, values + rows.end, value);
}

void set_rows(const ComputeParams* params, Tensor* op) {
    const Tensor *from = op->src[0], *ids = op->src[1];
    const int64_t *places = static_cast<const int64_t*>(ids->data), count = from->ne[1], size = op->ne[1];
    const Rows rows(count, params);
    for (int64_t plane = 0; plane < from->ne[2]; plane++) {
        const float* values = static_cast<const float*>(from->data) + plane * count;
        float* to = static_cast<float*>(op->data) + plane * size;
        for (int64_t i = rows.first; i < rows.end; i++) {
            if (places[i] < 0 || places[i] >= size) ggml::fail("row %lld of %lld", (long long)places[i], (long long)size);
            to[places[i]] = values[i];
        }
    }
}

}  // namespace

bool spreads(const Tensor* op) {
    if (!is_dense(op, ggml::GGML_TYPE_F32, sizeof(float))) return false;
    if (op->op == ggml::GGML_OP_FILL) return true;
    if (op->op != ggml::GGML_OP_SET_ROWS || !is_dense(op->src[0], ggml::GGML_TYPE_F32, sizeof(float))) return false;
    const Tensor* ids = op->src[1];  // the same for all planes
    return ids->type == ggml::GGML_TYPE_I64 && ids->nb[0] == sizeof(int64_t) && ids->ne[0] == op->src[0]->ne[1] &&
           num_values(ids) == ids->ne[0];
}

bool SpreadingTraits::work_size(int, const Tensor*, size_t&) { return true; }

bool SpreadingTraits::compute_forward(ComputeParams* params, Tensor* op) {
    if (op->op == ggml::GGML_OP_FILL) fill(params, op);
    if (op->op == ggml::GGML_OP_SET_ROWS) set_rows(params, op);
    return true;
}

}  // namespace edgespec
