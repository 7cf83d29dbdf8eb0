// Attention of a step. A few tokens are one pass, each stage of which all threads share. Of a prompt's tokens and
// of those of several texts, threads take units: a few tokens of one text and one head of the cache, for which
// nobody waits.
#include "ggml_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "ggml_products.h"

namespace edgespec {
namespace {

using ggml::ComputeParams;
using ggml::functions;
using ggml::Tensor;

constexpr size_t kAlignment = 64;
constexpr int64_t kMostHeads = 256;
constexpr int64_t kUnitRows = 36;         // of queries: each reads the keys anew
constexpr int64_t kUnitBytes = 2 << 20;   // of scores: they stay in the second cache
constexpr int64_t kUnitsAThread = 2;      // at least, or threads would wait for the last

struct Parameters {
    float scale, max_bias, softcap;
};

Parameters parameters(const Tensor* op) {
    Parameters found;
    memcpy(&found, op->op_params, sizeof found);
    return found;
}

bool cache_type(const Tensor* cache, CacheType& type) {
    switch (cache->type) {
        case ggml::GGML_TYPE_F16: type = CacheType::f16; break;
        case ggml::GGML_TYPE_BF16: type = CacheType::bf16; break;
        case ggml::GGML_TYPE_Q8_0: type = CacheType::q8_0; break;
        case ggml::GGML_TYPE_Q4_0: type = CacheType::q4_0; break;
        default: return false;
    }
    return cache->nb[0] == functions.type_size(cache->type);
}

bool has_sizes(const Tensor* op) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    const int64_t streams = q->ne[3];  // texts that have cells of their own
    bool is_one = k->ne[3] == streams && v->ne[3] == streams && mask->ne[2] == 1 && mask->ne[3] == streams;
    bool shares = k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0 && mask->ne[0] >= k->ne[1];
    CacheType keys, values;
    return is_one && shares && q->ne[2] <= kMostHeads && cache_type(k, keys) && cache_type(v, values) &&
           computes_attention(k->ne[0], keys, v->ne[0], values, k->ne[1]);
}

bool has_types(const Tensor* op) {
    const Tensor *q = op->src[0], *mask = op->src[3];
    return q->type == ggml::GGML_TYPE_F32 && q->nb[0] == sizeof(float) && mask && mask->type == ggml::GGML_TYPE_F16 &&
           mask->nb[0] == sizeof(uint16_t);
}

Attention::Cache cache_of(const Tensor* x, int64_t stream) {
    Attention::Cache cache;
    cache.data = static_cast<const char*>(x->data) + stream * int64_t(x->nb[3]);
    cache_type(x, cache.type);
    cache.cell = int64_t(x->nb[1]);
    cache.head = int64_t(x->nb[2]);
    return cache;
}

// What ALiBi multiplies the mask by: for H heads, rounded down to a power of two, m^1, m^2, ... with
// m = 2^(-max_bias / H); those of the other heads lie between (arXiv:2108.12409).
void set_slopes(float max_bias, int64_t heads, float* slopes) {
    int64_t base = 1;
    while (2 * base <= heads) base *= 2;
    const float m = std::pow(2.0f, -max_bias / float(base)), between = std::pow(2.0f, -max_bias / 2 / float(base));
    for (int64_t h = 0; h < heads; h++)
        slopes[h] = h < base ? std::pow(m, float(h + 1)) : std::pow(between, float(2 * (h - base) + 1));
}

template <class Value>
Value* part_of(const Tensor* x, int64_t stream) {
    return reinterpret_cast<Value*>(static_cast<char*>(x->data) + stream * int64_t(x->nb[3]));
}

// The operation for one stream; `slopes` has room for kMostHeads.
Attention attention_of(const Tensor* op, int64_t stream, float* slopes) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    const Parameters p = parameters(op);
    Attention a;
    a.tokens = q->ne[1];
    a.heads = q->ne[2];
    a.kv_heads = k->ne[2];
    a.dk = k->ne[0];
    a.dv = v->ne[0];
    a.cells = k->ne[1];
    a.q = part_of<const float>(q, stream);
    a.q_token = int64_t(q->nb[1] / sizeof(float));
    a.q_head = int64_t(q->nb[2] / sizeof(float));
    a.k = cache_of(k, stream);
    a.v = cache_of(v, stream);
    a.mask = part_of<const uint16_t>(mask, stream);
    a.mask_token = int64_t(mask->nb[1] / sizeof(uint16_t));
    a.out = part_of<float>(op, stream);
    a.out_head = int64_t(op->nb[1] / sizeof(float));
    a.out_token = int64_t(op->nb[2] / sizeof(float));
    a.scale = p.scale;
    a.softcap = p.softcap;
    a.slopes = p.max_bias > 0 ? slopes : nullptr;
    if (a.slopes) set_slopes(p.max_bias, a.heads, slopes);
    a.sinks = sinks ? static_cast<const float*>(sinks->data) : nullptr;
    return a;
}

AttentionSizes sizes_of(const Tensor* op) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    return {q->ne[1], q->ne[2], k->ne[2], v->ne[0], k->ne[1]};
}

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// How a step is split: units of at most `tokens` tokens and one head of the cache.
struct Units {
    int64_t tokens;

    explicit Units(const AttentionSizes& s) {
        const int64_t group = s.heads / s.kv_heads, row_bytes = s.cells * int64_t(sizeof(float));
        tokens = std::max<int64_t>(1, std::min(kUnitRows, kUnitBytes / row_bytes) / group);
        tokens = std::min({tokens, s.tokens, 2 * kAttentionTokens});
    }

    // Passes are for steps too short to give every thread some units, and compute each token as if it saw what
    // any of them sees.
    static bool are_used(const Attention& a, const Tiles& tiles, int threads) {
        const int64_t count = tiles.count * a.kv_heads;
        if (tiles.texts > 1) return count >= threads;
        return a.tokens > kAttentionTokens && count >= kUnitsAThread * threads;
    }

    // Of a thread's own memory at most, for any number of tokens: more cells never take less.
    static size_t bytes(const AttentionSizes& s) {
        const int64_t group = s.heads / s.kv_heads, row_bytes = s.cells * int64_t(sizeof(float));
        const int64_t scores = std::max(group * row_bytes, std::min(kUnitRows * row_bytes, kUnitBytes));
        const size_t list = size_t(s.cells) * sizeof(int32_t);
        return aligned(size_t(scores) + attention_bytes(std::max(group, kUnitRows), 1, s.dv, 0, 1) + list);
    }
};

void compute_units(ComputeParams* params, const Attention& a, const Tiles& tiles, uint8_t* memory, size_t unit_bytes) {
    const AttentionStages& stages = *attention_stages();
    memory += unit_bytes * size_t(params->ith);
    if (params->ith == 0) functions.set_chunk(params->threadpool, params->nth);
    functions.barrier(params->threadpool);
    for (int64_t i = params->ith; i < tiles.count * a.kv_heads; i = functions.take_chunk(params->threadpool, 1)) {
        const uint16_t* start = tiles.starts + i / a.kv_heads;
        const Attention unit = a.of_head(i % a.kv_heads).of_tokens(start[0], start[1] - start[0]);
        for (auto stage : {stages.scores, stages.weights, stages.values}) stage(unit, memory, 0, 1);
    }
}

void compute_passes(ComputeParams* params, const Attention& a, uint8_t* memory) {
    const AttentionStages& stages = *attention_stages();
    for (int64_t first = 0; first < a.tokens; first += kAttentionTokens) {
        const Attention pass = a.of_tokens(first, std::min(kAttentionTokens, a.tokens - first));
        if (first > 0) functions.barrier(params->threadpool);
        stages.scores(pass, memory, params->ith, params->nth);
        functions.barrier(params->threadpool);
        stages.weights(pass, memory, params->ith, params->nth);
        functions.barrier(params->threadpool);
        stages.values(pass, memory, params->ith, params->nth);
    }
}

}  // namespace

bool attends(const Tensor* op, const ggml::BufferType* packed) {
    return op->op == ggml::GGML_OP_FLASH_ATTN_EXT && has_types(op) && has_sizes(op) && comes_from(op->src[0], packed);
}

size_t attention_work_bytes(const AttentionSizes& s, int threads) {
    const size_t pass = attention_bytes(std::min(s.tokens, kAttentionTokens), s.heads, s.dv, s.cells, threads);
    // OpenMP may give fewer threads than `threads`, and with these units may be used that are too few for all. No
    // more threads use units than there are units (`are_used`), which are never more than tokens x heads of the cache.
    const int64_t most = std::min<int64_t>(threads, s.tokens * s.kv_heads);
    const size_t units = s.tokens > 1 ? size_t(most) * Units::bytes(s) : 0;
    return std::max(pass, units) + kAlignment;
}

bool AttentionTraits::work_size(int threads, const Tensor* op, size_t& size) {
    size = attention_work_bytes(sizes_of(op), threads);
    return true;
}

// Some tokens of a stream.
static void compute_part(ComputeParams* params, const Attention& a, const AttentionSizes& sizes, uint8_t* memory) {
    const Tiles tiles(a, Units(sizes).tokens);
    if (Units::are_used(a, tiles, params->nth))
        compute_units(params, a, tiles, memory, Units::bytes(sizes));
    else
        compute_passes(params, a, memory);
}

bool AttentionTraits::compute_forward(ComputeParams* params, Tensor* op) {
    float slopes[kMostHeads];
    const AttentionSizes sizes = sizes_of(op);
    uint8_t* memory = reinterpret_cast<uint8_t*>(aligned(reinterpret_cast<size_t>(params->wdata)));
    for (int64_t stream = 0; stream < op->src[0]->ne[3]; stream++) {
        const Attention a = attention_of(op, stream, slopes);
        for (int64_t first = 0; first < a.tokens; first += kMostTiled) {
            if (stream + first > 0) functions.barrier(params->threadpool);
            compute_part(params, a.of_tokens(first, std::min(kMostTiled, a.tokens - first)), sizes, memory);
        }
    }
    return true;
}

}  // namespace edgespec
