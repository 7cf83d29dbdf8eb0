// Attention of a step: its tokens in passes over the cache, each in three stages that all threads share.
#include "ggml_attention.h"

#include <algorithm>
#include <cstring>

#include "attention.h"

namespace edgespec {
namespace {

using ggml::ComputeParams;
using ggml::functions;
using ggml::Tensor;

constexpr size_t kAlignment = 64;
// Larger steps read prompts, for which llama.cpp has tiles. Not with bf16 keys, which are there to be exact:
// a token must round alike in a prompt and in a step.
constexpr int64_t kMostTokens = 64;
constexpr int kMostHops = 16;        // from a query to the weights that made it

struct Parameters {
    float scale, max_bias, softcap;
};

Parameters parameters(const Tensor* op) {
    Parameters found;
    memcpy(&found, op->op_params, sizeof found);
    return found;
}

bool comes_from(const Tensor* x, const ggml::BufferType* packed) {
    for (int hop = 0; x && hop < kMostHops; hop++, x = x->src[0])
        if (x->op == ggml::kMulMat && x->src[0]->buffer && x->src[0]->buffer->type == packed) return true;
    return false;
}

bool has_sizes(const Tensor* op) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    bool is_one = q->ne[3] == 1 && k->ne[3] == 1 && v->ne[3] == 1 && mask->ne[2] == 1 && mask->ne[3] == 1;
    bool shares = k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0 && mask->ne[0] >= k->ne[1];
    bool is_ours = q->ne[1] <= kMostTokens || k->type == ggml::kBf16;
    return is_one && shares && is_ours && computes_attention(k->ne[0], v->ne[0], k->ne[1]);
}

bool has_types(const Tensor* op) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    bool has_keys = k->type == ggml::kF16 || k->type == ggml::kBf16;
    return q->type == ggml::kF32 && has_keys && v->type == ggml::kF16 && mask && mask->type == ggml::kF16 &&
           q->nb[0] == 4 && k->nb[0] == 2 && v->nb[0] == 2 && mask->nb[0] == 2;
}

// The part of an operation that is one pass: `count` tokens from `first` on.
Attention pass_of(const Tensor* op, int64_t first, int64_t count) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    Attention a;
    a.tokens = count;
    a.heads = q->ne[2];
    a.kv_heads = k->ne[2];
    a.dk = k->ne[0];
    a.dv = v->ne[0];
    a.cells = k->ne[1];
    a.q_token = int64_t(q->nb[1] / sizeof(float));
    a.q_head = int64_t(q->nb[2] / sizeof(float));
    a.q = static_cast<const float*>(q->data) + first * a.q_token;
    a.k = static_cast<const char*>(k->data);
    a.k_is_bf16 = k->type == ggml::kBf16;
    a.k_cell = int64_t(k->nb[1]);
    a.k_head = int64_t(k->nb[2]);
    a.v = static_cast<const char*>(v->data);
    a.v_cell = int64_t(v->nb[1]);
    a.v_head = int64_t(v->nb[2]);
    a.mask_token = int64_t(mask->nb[1] / sizeof(uint16_t));
    a.mask = static_cast<const uint16_t*>(mask->data) + first * a.mask_token;
    a.out_head = int64_t(op->nb[1] / sizeof(float));
    a.out_token = int64_t(op->nb[2] / sizeof(float));
    a.out = static_cast<float*>(op->data) + first * a.out_token;
    a.scale = parameters(op).scale;
    a.sinks = sinks ? static_cast<const float*>(sinks->data) : nullptr;
    return a;
}

}  // namespace

bool attends(const Tensor* op, const ggml::BufferType* packed) {
    if (op->op != ggml::kFlashAttention || !has_types(op) || !has_sizes(op)) return false;
    Parameters p = parameters(op);
    return p.max_bias == 0 && p.softcap == 0 && comes_from(op->src[0], packed);
}

size_t attention_work_bytes(int64_t tokens, int64_t heads, int64_t cells) {
    return attention_bytes(tokens, heads, cells) + kAlignment;
}

bool AttentionTraits::work_size(int, const Tensor* op, size_t& size) {
    size = attention_work_bytes(op->src[0]->ne[1], op->src[0]->ne[2], op->src[1]->ne[1]);
    return true;
}

bool AttentionTraits::compute_forward(ComputeParams* params, Tensor* op) {
    size_t at = reinterpret_cast<size_t>(params->wdata);
    void* memory = reinterpret_cast<void*>((at + kAlignment - 1) / kAlignment * kAlignment);
    int64_t tokens = op->src[0]->ne[1];
    for (int64_t first = 0; first < tokens; first += kAttentionTokens) {
        Attention a = pass_of(op, first, std::min(kAttentionTokens, tokens - first));
        if (first > 0) functions.barrier(params->threadpool);
        attention_scores(a, memory, params->ith, params->nth);
        functions.barrier(params->threadpool);
        attention_weights(a, memory, params->ith, params->nth);
        functions.barrier(params->threadpool);
        attention_values(a, memory, params->ith, params->nth);
    }
    return true;
}

}  // namespace edgespec
