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

size_t attention_bytes(int64_t tokens, int64_t heads, int64_t dv, int64_t cells, int64_t threads) {
    return size_t(tokens * heads * (cells + dv + 1)) * sizeof(float) + size_t(threads * list_size(cells)) * sizeof(int32_t);
}

// Texts may begin alike, and branches of a tree end differently: the cell that so many of a token's own come after
// is seen by those of its text alone.
constexpr int64_t kOwn = 16;

static bool is_hidden(const uint16_t* block) {
    uint16_t shown = 0;
    for (int64_t c = 0; c < kCellBlock; c++) shown |= uint16_t(block[c] ^ kHidden);
    return !shown;
}

// That cell, or the first one that the token sees.
static int64_t telling_cell(const Attention& a, int64_t token) {
    const uint16_t* mask = a.mask + token * a.mask_token;
    int64_t found = 0, after = 0;
    for (int64_t block = a.cells - kCellBlock; block >= 0 && after < kOwn; block -= kCellBlock) {
        if (is_hidden(mask + block)) continue;
        for (int64_t c = block + kCellBlock - 1; c >= block && after < kOwn; c--)
            if (mask[c] != kHidden) found = c, after++;
    }
    return found;
}

Tiles::Tiles(const Attention& a, int64_t most) {
    int64_t telling = 0;
    for (int64_t t = 0; t < a.tokens; t++) {
        const bool goes_on = t > 0 && a.mask[t * a.mask_token + telling] != kHidden;
        if (!goes_on) telling = telling_cell(a, t), texts++;
        if (!goes_on || t - starts[count - 1] == most) starts[count++] = uint16_t(t);
    }
    starts[count] = uint16_t(a.tokens);
}

}  // namespace edgespec
