// MUL_MAT, MUL_MAT_ID and GET_ROWS of ggml on packed weights. All threads of a step come here with the same operation.
#include "ggml_products.h"

#include <algorithm>
#include <cstring>

namespace edgespec {
namespace {

using ggml::ComputeParams;
using ggml::functions;
using ggml::Tensor;

constexpr size_t kAlignment = 64;
constexpr int kMostHops = 16;             // from a value to the weights that made it
constexpr int64_t kChunkBytes = 128 << 10;  // of weights: what a thread takes at a time
constexpr int64_t kSharedBytes = 1 << 20;   // of floats for each thread: less is split evenly
constexpr int64_t kRowsAThread = 8;         // of floats

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

uint8_t* work(const ComputeParams* params) {
    return reinterpret_cast<uint8_t*>(aligned(reinterpret_cast<size_t>(params->wdata)));
}

const Format& format(const Tensor* weights) { return *static_cast<const Format*>(weights->extra); }

const float* column(const Tensor* x, int64_t i1, int64_t i2, int64_t i3) {
    const char* data = static_cast<const char*>(x->data);
    return reinterpret_cast<const float*>(data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3]);
}

float* result(const Tensor* op, int64_t i1, int64_t i2, int64_t i3) {
    return const_cast<float*>(column(op, i1, i2, i3));
}

const uint8_t* panels(const Tensor* weights, int64_t matrix) {
    const Format& f = format(weights);
    int64_t rows = weights->ne[1] / f.panel_rows;
    return static_cast<const uint8_t*>(weights->data) + matrix * rows * f.panel_bytes(weights->ne[0]);
}

// A thread's share of n columns of k activations, quantized. A single one is shared block by block.
void quantize_share(const ComputeParams* params, const Tensor* x, int64_t i2, int64_t i3, Activations to) {
    int64_t k = x->ne[0], n = x->ne[1];
    if (n == 1) {
        int64_t blocks = k / 32;
        quantize_blocks(column(x, 0, i2, i3), blocks * params->ith / params->nth,
                        blocks * (params->ith + 1) / params->nth, to.blocks);
        return;
    }
    quantize(column(x, 0, i2, i3), int64_t(x->nb[1] / sizeof(float)), n * params->ith / params->nth,
             n * (params->ith + 1) / params->nth, k, to);
}

// Panels go to threads in chunks, first come first served: a slow core takes fewer.
struct Chunks {
    int64_t panels, size, count;

    Chunks(int64_t panels, size_t panel_bytes, int threads) : panels(panels) {
        int64_t fair = (panels + 4 * threads - 1) / (4 * threads);
        size = std::min(fair, kChunkBytes / int64_t(panel_bytes));
        size = threads == 1 ? panels : std::max<int64_t>(2, (size + 1) / 2 * 2);  // products take panels in pairs
        count = (panels + size - 1) / size;
    }
};

// Calls `multiply(first, end)` for chunks of panels until none are left.
template <class Multiply>
void share(const ComputeParams* params, const Chunks& chunks, Multiply multiply) {
    for (int64_t c = params->ith; c < chunks.count; c = functions.take_chunk(params->threadpool, 1))
        multiply(c * chunks.size, std::min(chunks.panels, (c + 1) * chunks.size));
}

// The first chunk of every thread is its own; the counter gives out the others.
void start_sharing(const ComputeParams* params) {
    if (params->ith == 0) functions.set_chunk(params->threadpool, params->nth);
    functions.barrier(params->threadpool);
}

// One thread's part of a product with weights that stay floats.
struct FloatPart {
    int64_t first_row, end_row, first_column, end_column;
};

void multiply_part(const Tensor* op, FloatPart part) {
    const Tensor *weights = op->src[0], *x = op->src[1];
    for (int64_t i3 = 0; i3 < x->ne[3]; i3++)
        for (int64_t i2 = 0; i2 < x->ne[2]; i2++)
            format(weights).multiply_floats(panels(weights, 0), part.first_row, part.end_row, weights->ne[0],
                                            column(x, part.first_column, i2, i3), int64_t(x->nb[1] / sizeof(float)),
                                            part.end_column - part.first_column,
                                            result(op, part.first_column, i2, i3), int64_t(op->nb[1] / sizeof(float)));
}

// Small matrices are split evenly, so that nobody waits: by rows, or by columns where there are too few rows.
void multiply_floats(const ComputeParams* params, const Tensor* op) {
    const Tensor* weights = op->src[0];
    const int64_t rows = weights->ne[1], n = op->src[1]->ne[1], i = params->ith, threads = params->nth;
    const int64_t row_bytes = int64_t(format(weights).row_bytes(weights->ne[0]));
    if (rows * row_bytes >= kSharedBytes * threads) {
        start_sharing(params);
        share(params, Chunks(rows, size_t(row_bytes), params->nth),
              [&](int64_t first, int64_t end) { multiply_part(op, {first, end, 0, n}); });
    } else if (rows >= kRowsAThread * threads || n < threads) {
        multiply_part(op, {rows * i / threads, rows * (i + 1) / threads, 0, n});
    } else {
        multiply_part(op, {0, rows, n * i / threads, n * (i + 1) / threads});
    }
}

void multiply_matrix(const ComputeParams* params, const Tensor* op) {
    const Tensor *weights = op->src[0], *x = op->src[1];
    const Format& f = format(weights);
    if (f.multiply_floats) return multiply_floats(params, op);
    int64_t k = weights->ne[0], n = x->ne[1];
    Chunks chunks(weights->ne[1] / f.panel_rows, f.panel_bytes(k), params->nth);
    Activations activations = activations_at(work(params), k);
    for (int64_t i3 = 0; i3 < x->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < x->ne[2]; i2++) {
            if (i2 + i3 > 0) functions.barrier(params->threadpool);  // the last plane's activations are in use
            quantize_share(params, x, i2, i3, activations);
            start_sharing(params);
            const uint8_t* matrix = panels(weights, 0);
            share(params, chunks, [&](int64_t first, int64_t end) {
                f.multiply(matrix, first, end, k, activations, n, result(op, 0, i2, i3),
                           int64_t(op->nb[1] / sizeof(float)));
            });
        }
    }
}

// One token of a step that goes to an expert: column `x` gives row `slot` of token `token`.
struct Routed {
    int32_t slot, token;
};

// Experts: op[rows, slots, tokens] = weights[k, rows, experts](ids[slots, tokens]) x[k, slots or 1, tokens].
struct Routing {
    int64_t experts, slots, tokens, columns;  // columns of x for each token

    explicit Routing(const Tensor* op)
        : experts(op->src[0]->ne[2]), slots(op->src[2]->ne[0]), tokens(op->src[2]->ne[1]), columns(op->src[1]->ne[1]) {}

    size_t bytes() const { return aligned(size_t(experts + 1) * sizeof(int64_t)) + aligned(size_t(slots * tokens) * sizeof(Routed)); }
    int64_t* starts(uint8_t* memory) const { return reinterpret_cast<int64_t*>(memory); }
    Routed* routed(uint8_t* memory) const {
        return reinterpret_cast<Routed*>(memory + aligned(size_t(experts + 1) * sizeof(int64_t)));
    }
};

int32_t expert_of(const Tensor* ids, int64_t slot, int64_t token) {
    int32_t expert;
    memcpy(&expert, static_cast<const char*>(ids->data) + slot * ids->nb[0] + token * ids->nb[1], sizeof expert);
    return expert;
}

// Sorts the tokens by expert: those of expert e are routed[starts[e]..starts[e + 1]).
void route(const Tensor* ids, const Routing& routing, uint8_t* memory) {
    int64_t* starts = routing.starts(memory);
    Routed* routed = routing.routed(memory);
    int64_t next = 0;
    for (int64_t e = 0; e < routing.experts; e++) {
        starts[e] = next;
        for (int64_t t = 0; t < routing.tokens; t++)
            for (int64_t s = 0; s < routing.slots; s++)
                if (expert_of(ids, s, t) == e) routed[next++] = {int32_t(s), int32_t(t)};
    }
    starts[routing.experts] = next;
}

void quantize_all_columns(const ComputeParams* params, const Tensor* x, Activations to) {
    int64_t columns = x->ne[1] * x->ne[2];
    for (int64_t c = columns * params->ith / params->nth; c < columns * (params->ith + 1) / params->nth; c++)
        quantize_blocks(column(x, c % x->ne[1], c / x->ne[1], 0), 0, x->ne[0] / 32, to.blocks + c * to.stride);
}

void multiply_experts(const ComputeParams* params, const Tensor* op) {
    const Tensor *weights = op->src[0], *x = op->src[1];
    const Format& f = format(weights);
    Routing routing(op);
    int64_t k = weights->ne[0], rows = weights->ne[1] / f.panel_rows;
    uint8_t* memory = work(params);
    Activations activations = activations_at(memory + routing.bytes(), k);
    if (!f.multiply_floats) quantize_all_columns(params, x, activations);
    if (params->ith == 0) route(op->src[2], routing, memory);
    start_sharing(params);
    const int64_t* starts = routing.starts(memory);
    const Routed* routed = routing.routed(memory);
    // Panels of all experts in one row. A panel stays in the first cache for all tokens of its expert.
    Chunks chunks(rows * routing.experts, f.panel_bytes(k), params->nth);
    share(params, chunks, [&](int64_t first, int64_t end) {
        for (int64_t p = first; p < end; p++) {
            for (int64_t i = starts[p / rows]; i < starts[p / rows + 1]; i++) {
                const uint8_t* matrix = panels(weights, p / rows);
                float* out = result(op, routed[i].slot, routed[i].token, 0);
                int64_t slot = routed[i].slot % routing.columns, from = routed[i].token * routing.columns + slot;
                Activations one = {activations.blocks + from * activations.stride, activations.stride};
                if (f.multiply_floats)
                    f.multiply_floats(matrix, p % rows, p % rows + 1, k, column(x, slot, routed[i].token, 0), 0, 1, out, 0);
                else
                    f.multiply(matrix, p % rows, p % rows + 1, k, one, 1, out, 0);
            }
        }
    });
}

// Rows of an embedding table: op[k, n] = table[k, rows](ids[n]).
void look_up(const ComputeParams* params, const Tensor* op) {
    const Tensor *table = op->src[0], *ids = op->src[1];
    for (int64_t i = params->ith; i < ids->ne[0]; i += params->nth) {
        int32_t row;
        memcpy(&row, static_cast<const char*>(ids->data) + i * ids->nb[0], sizeof row);
        unpack_row(format(table), panels(table, 0), row, table->ne[0], result(op, i, 0, 0));
    }
}

bool has_float_rows(const Tensor* x) { return x->type == ggml::kF32 && x->nb[0] == sizeof(float); }

}  // namespace

const Format* format_of(const Tensor* weights) {
    size_t row = functions.type_size(weights->type) * size_t(weights->ne[0] / functions.block_size(weights->type));
    bool is_whole = !weights->view_src && weights->nb[1] == row && weights->nb[2] == row * size_t(weights->ne[1]);
    return is_whole && weights->ne[3] == 1 ? find(weights->type, weights->ne[1], weights->ne[0]) : nullptr;
}

size_t packed_bytes(const Tensor* weights) {
    const Format* f = format_of(weights);
    if (!f) return functions.nbytes(weights);
    return size_t(weights->ne[1] / f->panel_rows * weights->ne[2]) * f->panel_bytes(weights->ne[0]);
}

// The queries of a quantized cache are rotated: that product's second factor leads on.
bool comes_from(const Tensor* x, const ggml::BufferType* packed) {
    for (int hop = 0; x && hop < kMostHops; hop++) {
        const bool is_product = x->op == ggml::kMulMat;
        if (is_product && x->src[0]->buffer && x->src[0]->buffer->type == packed) return true;
        x = x->src[is_product ? 1 : 0];
    }
    return false;
}

size_t multiplication_work_bytes(int64_t k, int64_t n) { return activation_bytes(k, n) + kAlignment; }

bool computes(const Tensor* op) {
    const Tensor *weights = op->src[0], *x = op->src[1];
    if (op->op != ggml::kMulMat && op->op != ggml::kMulMatId && op->op != ggml::kGetRows) return false;
    if (!format_of(weights) || !has_float_rows(op)) return false;
    if (x->buffer && !functions.is_host(x->buffer->type)) return false;
    if (op->op == ggml::kGetRows) return x->type == ggml::kI32 && weights->ne[2] == 1 && x->ne[1] == 1 && x->ne[2] == 1;
    if (!has_float_rows(x)) return false;
    if (op->op == ggml::kMulMatId) return x->ne[3] == 1 && op->src[2]->type == ggml::kI32;
    return weights->ne[2] == 1;
}

bool PackedTraits::work_size(int, const Tensor* op, size_t& size) {
    const Tensor* x = op->src[1];
    if (op->op == ggml::kGetRows) return true;
    int64_t columns = op->op == ggml::kMulMatId ? x->ne[1] * x->ne[2] : x->ne[1];
    size = format(op->src[0]).multiply_floats ? kAlignment : multiplication_work_bytes(x->ne[0], columns);
    if (op->op == ggml::kMulMatId) size += Routing(op).bytes();
    return true;
}

bool PackedTraits::compute_forward(ComputeParams* params, Tensor* op) {
    if (op->op == ggml::kMulMat) multiply_matrix(params, op);
    if (op->op == ggml::kMulMatId) multiply_experts(params, op);
    if (op->op == ggml::kGetRows) look_up(params, op);
    return true;
}

}  // namespace edgespec
