// MUL_MAT, MUL_MAT_ID and GET_ROWS of ggml on packed weights. All threads of a step come here with the same operation.
#include "ggml_products.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "expert_cache.h"
#include "packed_memory.h"

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
constexpr int64_t kAloneBytes = 512 << 10;  // of weights for each thread: see works_alone
constexpr int64_t kAloneValues = 2048;      // that each thread quantizes
constexpr int64_t kTileColumns = 64;        // of an expert, gathered
constexpr int64_t kResults = 16 << 10;      // of an expert's tile, before they go to their places

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
    return static_cast<const uint8_t*>(weights->data) + size_t(matrix) * matrix_bytes(format(weights), weights);
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

    // `most`: panels of a chunk at most, where that is given.
    Chunks(int64_t panels, size_t panel_bytes, int threads, int64_t most = 0) : panels(panels) {
        int64_t fair = (panels + 4 * threads - 1) / (4 * threads);
        size = std::min(fair, kChunkBytes / int64_t(panel_bytes));
        size = threads == 1 ? panels : std::max<int64_t>(2, (size + 1) / 2 * 2);  // products take panels in pairs
        if (most) size = std::min(size, most);
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

// Whether each thread quantizes all columns for itself and multiplies its share of the rows: meeting at a barrier
// takes longer than the few blocks, and a draft model of 30 layers would do so 210 times a step.
bool works_alone(const Tensor* weights, const Tensor* x, int threads) {
    const int64_t k = weights->ne[0], values = k * x->ne[1], panels = weights->ne[1] / format_of(weights)->panel_rows;
    return values <= kAloneValues && x->ne[2] * x->ne[3] == 1 &&
           panels * int64_t(format_of(weights)->panel_bytes(k)) <= kAloneBytes * threads;
}

void multiply_alone(const ComputeParams* params, const Tensor* op) {
    const Tensor *weights = op->src[0], *x = op->src[1];
    const Format& f = format(weights);
    const int64_t k = weights->ne[0], n = x->ne[1], rows = weights->ne[1] / f.panel_rows;
    const Activations activations = activations_at(work(params) + params->ith * activation_bytes(k, n), k);
    quantize(column(x, 0, 0, 0), int64_t(x->nb[1] / sizeof(float)), 0, n, k, activations);
    f.multiply(panels(weights, 0), rows * params->ith / params->nth, rows * (params->ith + 1) / params->nth, k,
               activations, n, result(op, 0, 0, 0), int64_t(op->nb[1] / sizeof(float)));
}

void multiply_matrix(const ComputeParams* params, const Tensor* op) {
    const Tensor *weights = op->src[0], *x = op->src[1];
    const Format& f = format(weights);
    if (f.multiply_floats) return multiply_floats(params, op);
    if (works_alone(weights, x, params->nth)) return multiply_alone(params, op);
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

// A column of a product of experts: column `from` of all activations gives row `slot` of token `token`.
struct Routed {
    int32_t slot, token, from;
};

// An expert with columns: they are routed[first..end).
struct Used {
    int64_t expert, first, end;
};

// Experts: op[rows, slots, tokens] = weights[k, rows, experts](ids[slots, tokens]) x[k, slots or 1, tokens].
// The work memory has the used experts, their columns, the activations, and for each thread a tile of these.
struct Routing {
    ExpertSizes sizes;

    explicit Routing(const Tensor* op)
        : sizes{op->src[0]->ne[0], op->src[0]->ne[2], op->src[2]->ne[0], op->src[1]->ne[1], op->src[2]->ne[1]} {}

    Used* used(uint8_t* memory) const { return reinterpret_cast<Used*>(memory); }
    Routed* routed(uint8_t* memory) const { return reinterpret_cast<Routed*>(memory + used_bytes(sizes)); }
    Activations activations(uint8_t* memory) const {
        return activations_at(memory + used_bytes(sizes) + routed_bytes(sizes), sizes.k);
    }
    Activations tile(uint8_t* memory, int thread) const {
        const Activations all = activations(memory);
        return {all.blocks + (sizes.columns * sizes.tokens + thread * tile_columns(sizes)) * all.stride, all.stride};
    }

    static size_t used_bytes(const ExpertSizes& s) { return aligned(size_t(s.experts + 1) * sizeof(Used)); }
    static size_t routed_bytes(const ExpertSizes& s) { return aligned(size_t(s.slots * s.tokens) * sizeof(Routed)); }
    // An expert has no token twice.
    static int64_t tile_columns(const ExpertSizes& s) { return std::min(s.tokens, kTileColumns); }
    static size_t bytes(const ExpertSizes& s, int threads) {
        const int64_t columns = s.columns * s.tokens + (s.tokens > 1 ? threads * tile_columns(s) : 0);
        return used_bytes(s) + routed_bytes(s) + activation_bytes(s.k, columns) + kAlignment;
    }
};

int64_t expert_of(const Tensor* ids, const ExpertSizes& sizes, int64_t slot, int64_t token) {
    int32_t expert;
    memcpy(&expert, static_cast<const char*>(ids->data) + slot * ids->nb[0] + token * ids->nb[1], sizeof expert);
    if (expert < 0 || expert >= sizes.experts) ggml::fail("a token was sent to expert %d of %d", expert, int(sizes.experts));
    return expert;
}

// A counting sort by expert. Behind the used experts comes one without columns.
void route(const Tensor* ids, const Routing& routing, uint8_t* memory) {
    const ExpertSizes& s = routing.sizes;
    Used* used = routing.used(memory);
    Routed* routed = routing.routed(memory);
    for (int64_t e = 0; e <= s.experts; e++) used[e] = {e, 0, 0};
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t i = 0; i < s.slots; i++) used[expert_of(ids, s, i, t)].end++;
    for (int64_t e = 0, next = 0; e < s.experts; e++) {
        const int64_t count = used[e].end;
        used[e].first = used[e].end = next;
        next += count;
    }
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t i = 0; i < s.slots; i++)
            routed[used[expert_of(ids, s, i, t)].end++] = {int32_t(i), int32_t(t), int32_t(t * s.columns + i % s.columns)};
    int64_t kept = 0;
    for (int64_t e = 0; e < s.experts; e++)
        if (used[e].first < used[e].end) used[kept++] = used[e];
    used[kept] = {s.experts, 0, 0};
}

// Has the used experts read that are not in memory, and puts these behind the others.
void request_used(ExpertCache& cache, const Tensor* weights, const Routing& routing, uint8_t* memory) {
    std::vector<ExpertUse> uses;
    Used *used = routing.used(memory), *end = used;
    for (; end->end; end++)
        for (int64_t i = end->first; i < end->end; i++) uses.push_back({end->expert, routing.routed(memory)[i].token});
    request_experts(cache, weights->data, uses, routing.sizes.tokens);
    std::stable_partition(used, end, [&](const Used& one) { return is_here(cache, weights->data, one.expert); });
}

void quantize_all_columns(const ComputeParams* params, const Tensor* x, Activations to) {
    int64_t columns = x->ne[1] * x->ne[2];
    for (int64_t c = columns * params->ith / params->nth; c < columns * (params->ith + 1) / params->nth; c++)
        quantize_blocks(column(x, c % x->ne[1], c / x->ne[1], 0), 0, x->ne[0] / 32, to.blocks + c * to.stride);
}

// Some panels of an expert.
struct ExpertPart {
    const uint8_t* matrix;
    int64_t first, end;  // panels
    const Routed* routed;
    int64_t count;  // columns
};

// Columns are gathered, for these are tiles as of any product, and results go to their places.
void multiply_expert(const Tensor* op, const ExpertPart& part, Activations x, Activations tile, int64_t tile_columns) {
    alignas(64) float results[kResults];
    const Tensor* weights = op->src[0];
    const Format& f = format(weights);
    const int64_t k = weights->ne[0], row = part.first * f.panel_rows, rows = (part.end - part.first) * f.panel_rows;
    const uint8_t* panel = part.matrix + part.first * int64_t(f.panel_bytes(k));
    const int64_t most = std::min(tile_columns, kResults / rows);
    for (int64_t i = 0, n; i < part.count; i += n) {
        const Routed* routed = part.routed + i;
        n = std::min(part.count - i, most);
        Activations columns = {x.blocks + routed->from * x.stride, x.stride};
        if (n > 1) {
            for (int64_t t = 0; t < n; t++)
                memcpy(tile.blocks + t * tile.stride, x.blocks + routed[t].from * x.stride, size_t(k / 32) * sizeof(ActivationBlock));
            columns = tile;
        }
        f.multiply(panel, 0, part.end - part.first, k, columns, n, results, rows);
        for (int64_t t = 0; t < n; t++)
            memcpy(result(op, routed[t].slot, routed[t].token, 0) + row, results + t * rows, size_t(rows) * sizeof(float));
    }
}

// The same of weights that stay floats, column by column.
void multiply_float_expert(const Tensor* op, const ExpertPart& part) {
    const Tensor *weights = op->src[0], *x = op->src[1];
    for (int64_t i = 0; i < part.count; i++) {
        const Routed& r = part.routed[i];
        format(weights).multiply_floats(part.matrix, part.first, part.end, weights->ne[0],
                                        column(x, r.slot % x->ne[1], r.token, 0), 0, 1, result(op, r.slot, r.token, 0), 0);
    }
}

void multiply_experts(const ComputeParams* params, const Tensor* op) {
    const Tensor* weights = op->src[0];
    const Format& f = format(weights);
    const Routing routing(op);
    const int64_t rows = weights->ne[1] / f.panel_rows;
    uint8_t* memory = work(params);
    const Activations x = routing.activations(memory), tile = routing.tile(memory, params->ith);
    ExpertCache* cache = expert_cache_of(weights->data);
    if (params->ith == 0) {
        route(op->src[2], routing, memory);
        if (cache) request_used(*cache, weights, routing, memory);
    }
    if (!f.multiply_floats) quantize_all_columns(params, op->src[1], x);
    start_sharing(params);
    const Chunks chunks(rows, f.panel_bytes(routing.sizes.k), params->nth, kResults / kTileColumns * 4 / f.panel_rows);
    const Used* used = routing.used(memory);
    int64_t before = 0;  // chunks of the used experts before this one
    for (int64_t c = params->ith;; c = functions.take_chunk(params->threadpool, 1)) {
        for (; used->end && c >= before + chunks.count; before += chunks.count) used++;
        if (!used->end) return;
        const int64_t first = (c - before) * chunks.size;
        const uint8_t* matrix = cache ? wait_for_expert(*cache, weights->data, used->expert) : panels(weights, used->expert);
        const ExpertPart part = {matrix, first, std::min(rows, first + chunks.size), routing.routed(memory) + used->first,
                                 used->end - used->first};
        if (f.multiply_floats)
            multiply_float_expert(op, part);
        else
            multiply_expert(op, part, x, tile, Routing::tile_columns(routing.sizes));
    }
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

bool has_float_rows(const Tensor* x) { return x->type == ggml::GGML_TYPE_F32 && x->nb[0] == sizeof(float); }

}  // namespace

const Format* format_of(const Tensor* weights) {
    size_t row = functions.type_size(weights->type) * size_t(weights->ne[0] / functions.block_size(weights->type));
    bool is_whole = !weights->view_src && weights->nb[1] == row && weights->nb[2] == row * size_t(weights->ne[1]);
    return is_whole && weights->ne[3] == 1 ? find(weights->type, weights->ne[1], weights->ne[0]) : nullptr;
}

size_t matrix_bytes(const Format& format, const Tensor* weights) {
    const size_t bytes = size_t(weights->ne[1] / format.panel_rows) * format.panel_bytes(weights->ne[0]);
    return weights->ne[2] > 1 ? whole_pages(bytes) : bytes;
}

size_t packed_bytes(const Tensor* weights) {
    const Format* f = format_of(weights);
    return f ? size_t(weights->ne[2]) * matrix_bytes(*f, weights) : functions.nbytes(weights);
}

// The queries of a quantized cache are rotated: that product's second factor leads on.
bool comes_from(const Tensor* x, const ggml::BufferType* packed) {
    for (int hop = 0; x && hop < kMostHops; hop++) {
        const bool is_product = x->op == ggml::GGML_OP_MUL_MAT;
        if (is_product && x->src[0]->buffer && x->src[0]->buffer->type == packed) return true;
        x = x->src[is_product ? 1 : 0];
    }
    return false;
}

size_t expert_work_bytes(const ExpertSizes& sizes, int threads) { return Routing::bytes(sizes, threads); }

bool computes(const Tensor* op) {
    const Tensor *weights = op->src[0], *x = op->src[1];
    if (op->op != ggml::GGML_OP_MUL_MAT && op->op != ggml::GGML_OP_MUL_MAT_ID && op->op != ggml::GGML_OP_GET_ROWS) return false;
    if (!format_of(weights) || !has_float_rows(op)) return false;
    if (x->buffer && !functions.is_host(x->buffer->type)) return false;
    if (op->op == ggml::GGML_OP_GET_ROWS) return x->type == ggml::GGML_TYPE_I32 && weights->ne[2] == 1 && x->ne[1] == 1 && x->ne[2] == 1;
    if (!has_float_rows(x)) return false;
    if (op->op == ggml::GGML_OP_MUL_MAT_ID) return x->ne[3] == 1 && op->src[2]->type == ggml::GGML_TYPE_I32;
    return weights->ne[2] == 1;
}

bool PackedTraits::work_size(int threads, const Tensor* op, size_t& size) {
    if (op->op == ggml::GGML_OP_GET_ROWS) return true;
    const Tensor *weights = op->src[0], *x = op->src[1];
    size = kAlignment;
    if (op->op == ggml::GGML_OP_MUL_MAT_ID)
        size = expert_work_bytes(Routing(op).sizes, threads);
    else if (!format_of(weights)->multiply_floats)  // of weights that lie nowhere, too
        size += activation_bytes(x->ne[0], x->ne[1]) * size_t(works_alone(weights, x, threads) ? threads : 1);
    return true;
}

bool PackedTraits::compute_forward(ComputeParams* params, Tensor* op) {
    if (op->op == ggml::GGML_OP_MUL_MAT) multiply_matrix(params, op);
    if (op->op == ggml::GGML_OP_MUL_MAT_ID) multiply_experts(params, op);
    if (op->op == ggml::GGML_OP_GET_ROWS) look_up(params, op);
    return true;
}

}  // namespace edgespec
