// Attention of a few tokens over a cache of keys and values: a block of cells is read once for all tokens and for
// all heads that share it. Blocks are of cells that any of the tokens sees, wherever these lie: texts of several
// users share a cache, and a token should not take longer for those of others.
//
// Promise: a token's result depends on its query, on the cells that it sees and on their order, not on what else is
// in the step, on what lies between these cells, on how work is split, or on the instruction set. A score is one chain
// of sums over a key's values. The maximum of scores and the sum of weights (of integers) do not depend on an order.
// Values are added up cell by cell, and cells that a token does not see add zero, even if they hold NaN or infinity.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgespec {

// What a cache holds. Those with blocks have an f16 scale for each 32 values.
enum class CacheType { f16, bf16, q8_0, q4_0 };

// One operation. Strides of `q` and `out` are in floats, those of the caches in bytes, of `mask` in halves.
struct Attention {
    struct Cache {
        const char* data;
        CacheType type;
        int64_t cell, head;

        const char* at(int64_t cell_number, int64_t head_number) const {
            return data + cell_number * cell + head_number * head;
        }
    };

    int64_t tokens, heads, kv_heads, dk, dv, cells;
    const float* q;
    int64_t q_token, q_head;
    Cache k, v;
    const uint16_t* mask;  // f16 [tokens, cells]: minus infinity for a cell that is not seen; else what scores gain
    int64_t mask_token;
    float* out;
    int64_t out_token, out_head;
    float scale;
    float softcap;        // scores become softcap x tanh(score / softcap); 0 for none
    const float* slopes;  // [heads]: what the mask is multiplied by (ALiBi), or nullptr
    const float* sinks;   // [heads], or nullptr

    int64_t group() const { return heads / kv_heads; }

    // The part of `count` tokens from `first` on.
    Attention of_tokens(int64_t first, int64_t count) const;
    // The part of one head of the cache, and of the heads that share it.
    Attention of_head(int64_t kv_head) const;
};

constexpr int64_t kAttentionTokens = 8;  // of one pass over the cache
constexpr int64_t kCellBlock = 32;       // the number of cells is a multiple of it
constexpr int64_t kMostHeadSize = 576;  // keys of latent attention: 512 that values share, and 64 that turn
constexpr uint16_t kHidden = 0xfc00;      // in a mask: minus infinity
constexpr int64_t kListHead = 16;         // numbers before a list of cells

// Numbers of a list of cells.
inline int64_t list_size(int64_t cells) { return kListHead + cells; }

// The three stages of a pass over a few tokens: every thread of `count` calls each with its `index` and the same
// memory, and all wait for each other between two stages.
struct AttentionStages {
    using Stage = void (*)(const Attention& a, void* memory, int64_t index, int64_t count);
    Stage scores, weights, values;
};

// Those for this processor, or nullptr.
const AttentionStages* attention_stages();

// Whether they have these sizes.
bool computes_attention(int64_t dk, CacheType k, int64_t dv, CacheType v, int64_t cells);

// Bytes of work memory of a pass by `threads`.
size_t attention_bytes(int64_t tokens, int64_t heads, int64_t dv, int64_t cells, int64_t threads);

constexpr int64_t kMostTiled = 2048;  // tokens

// A step's tokens in tiles that see about the same cells: those of one text, at most so many at a time.
struct Tiles {
    int64_t count = 0, texts = 0;
    uint16_t starts[kMostTiled + 1];  // [count + 1]

    Tiles(const Attention& a, int64_t most);
};

}  // namespace edgespec
