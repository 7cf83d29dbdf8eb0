// Which attention there is on this processor, and what it needs.
#include "attention.h"

#include <algorithm>

#include "tables.h"

namespace edgespec {

Attention Attention::of_tokens(int64_t first, int64_t count) const {
    Attention part = *this;
    part.tokens = count;
    part.q += first * q_token;
    part.mask += first * mask_token;
    part.out += first * out_token;
    return part;
}

Attention Attention::of_head(int64_t kv_head) const {
    Attention part = *this;
    const int64_t first = kv_head * group();
    part.heads = group();
    part.kv_heads = 1;
    part.q += first * q_head;
    part.k.data = k.at(0, kv_head);
    part.v.data = v.at(0, kv_head);
    part.out += first * out_head;
    if (slopes) part.slopes += first;
    if (sinks) part.sinks += first;
    return part;
}

static bool fits(int64_t size, CacheType type) {
    const bool has_blocks = type == CacheType::q8_0 || type == CacheType::q4_0;
    return size > 0 && size <= kMostHeadSize && size % (has_blocks ? 32 : 16) == 0;
}

bool computes_attention(int64_t dk, CacheType k, int64_t dv, CacheType v, int64_t cells) {
    return attention_stages() && fits(dk, k) && fits(dv, v) && cells % kCellBlock == 0;
}

size_t attention_bytes(int64_t tokens, int64_t heads, int64_t dv, int64_t cells) {
    return size_t(tokens * heads * (cells + dv + 1)) * sizeof(float) + size_t(cells / kCellBlock);
}

}  // namespace edgespec
