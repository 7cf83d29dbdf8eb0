// Attention of a few tokens over a cache of f16 or bf16 keys and f16 values: each cell is read once for all tokens and
// for all heads that share it.
//
// Promise: a token's result depends on its query and on the cells that it sees, not on what else is in the
// step, on where cells lie, or on how work is split. Scores are sums of one cell each. Their maximum and
// their sum (of integers) do not depend on an order. Values are added up cell by cell, and cells that a token
// does not see add zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgespec {

// One operation. Strides of `q` and `out` are in floats, those of `k` and `v` in bytes, of `mask` in halves.
struct Attention {
    int64_t tokens, heads, kv_heads, dk, dv, cells;
    const float* q;
    int64_t q_token, q_head;
    const char *k, *v;
    bool k_is_bf16;
    int64_t k_cell, k_head, v_cell, v_head;
    const uint16_t* mask;  // f16 [tokens, cells]: 0 for a cell that is seen, minus infinity for one that is not
    int64_t mask_token;
    float* out;
    int64_t out_token, out_head;
    float scale;
    const float* sinks;  // [heads], or nullptr

    int64_t group() const { return heads / kv_heads; }
};

constexpr int64_t kAttentionTokens = 8;   // of one pass over the cache
constexpr int64_t kCellBlock = 16;        // cells and heads' sizes are multiples of it
constexpr int64_t kMostHeadSize = 256;

// Whether there is a product for these sizes on this processor.
bool computes_attention(int64_t dk, int64_t dv, int64_t cells);

// Bytes of work memory of a pass; `tokens` as in Attention.
size_t attention_bytes(int64_t tokens, int64_t heads, int64_t cells);

// The three stages of a pass over `tokens` <= kAttentionTokens: every thread of `count` calls each with its
// `index` and the same memory, and all wait for each other between two stages.
void attention_scores(const Attention& a, void* memory, int64_t index, int64_t count);
void attention_weights(const Attention& a, void* memory, int64_t index, int64_t count);
void attention_values(const Attention& a, void* memory, int64_t index, int64_t count);

}  // namespace edgespec
