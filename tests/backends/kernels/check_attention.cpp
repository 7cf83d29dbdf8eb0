// Checks attention against float64, and that a token's result depends on what it sees alone: not on its step, on
// threads, on hidden cells or on the instruction set. Prints each failure and, last, how many there were.
// With "time" as an argument: milliseconds of one thread by type and number of tokens. With a number: so many cases.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "products.h"

using namespace edgespec;

static std::mt19937 generator(7);
static int failures = 0;

static float normal() { return std::normal_distribution<float>()(generator); }
static int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

static float bf16_to_float(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

static float half_to_float(uint16_t half) {
    int exponent = half >> 10 & 31, fraction = half & 1023;
    float value = exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24);
    return half >> 15 ? -value : value;
}

static uint16_t halves_at(const char* at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return bits;
}

// A finite half of about the size of a normal variable.
static uint16_t some_half() { return uint16_t(between(0, 1) << 15 | between(5, 16) << 10 | between(0, 1023)); }
static uint16_t some_bf16() { return uint16_t(between(0, 1) << 15 | between(118, 128) << 7 | between(0, 127)); }

static int64_t bytes_of(CacheType type, int64_t values) {
    return type == CacheType::q8_0 ? values / 32 * 34 : type == CacheType::q4_0 ? values / 32 * 18 : 2 * values;
}

// Random contents of a cache of [cells][kv_heads][size] values, which begin at `offset`.
struct Cache {
    CacheType type;
    int64_t kv_heads, size;
    std::vector<char> bytes;

    Cache(CacheType type, int64_t cells, int64_t kv_heads, int64_t size)
        : type(type), kv_heads(kv_heads), size(size), bytes(size_t(bytes_of(type, cells * kv_heads * size))) {
        const bool has_blocks = type == CacheType::q8_0 || type == CacheType::q4_0;
        const size_t block = size_t(bytes_of(type, 32));
        for (char& byte : bytes) byte = char(generator());
        for (size_t at = 0; at < bytes.size(); at += has_blocks ? block : 2) {
            uint16_t value = type == CacheType::bf16 ? some_bf16() : some_half();
            if (has_blocks) value = uint16_t(between(0, 1) << 15 | between(2, 8) << 10 | between(0, 1023));
            memcpy(&bytes[at], &value, 2);
        }
    }

    // NaN and infinities, in places, of all heads of a cell: as values, or as scales of blocks.
    void poison(int64_t cell) {
        const uint16_t infinity = type == CacheType::bf16 ? 0x7f80 : 0x7c00;
        const int64_t step = type == CacheType::q8_0 ? 34 : type == CacheType::q4_0 ? 18 : 2;
        const int64_t end = (cell + 1) * view().cell;
        for (int64_t at = cell * view().cell; at < end; at += step * between(1, 3)) {
            const uint16_t value = uint16_t(between(0, 1) << 15 | (infinity + (between(0, 1) ? 64 : 0)));
            memcpy(&bytes[size_t(at)], &value, 2);
        }
    }

    Attention::Cache view() const {
        return {bytes.data(), type, bytes_of(type, kv_heads * size), bytes_of(type, size)};
    }

    double value(int64_t cell, int64_t head, int64_t i) const {
        const char* at = view().at(cell, head);
        if (type == CacheType::f16) return half_to_float(halves_at(at + 2 * i));
        if (type == CacheType::bf16) return bf16_to_float(halves_at(at + 2 * i));
        const char* block = at + bytes_of(type, i / 32 * 32);
        const int64_t j = i % 32;
        int number = type == CacheType::q8_0 ? int8_t(block[2 + j]) : (uint8_t(block[2 + j % 16]) >> (j / 16 * 4) & 15) - 8;
        return double(half_to_float(halves_at(block))) * number;
    }
};

// A cache, queries, and who sees what.
struct Case {
    int64_t tokens, heads, kv_heads, dk, dv, cells;
    std::vector<float> q, out, sinks, slopes;
    Cache k, v;
    std::vector<uint16_t> mask;
    bool has_sinks = false, has_slopes = false;
    float softcap = 0;

    Case(int64_t tokens, int64_t group, int64_t kv_heads, int64_t dk, CacheType k, int64_t dv, CacheType v, int64_t cells)
        : tokens(tokens), heads(group * kv_heads), kv_heads(kv_heads), dk(dk), dv(dv), cells(cells),
          q(size_t(tokens * heads * dk)), out(size_t(tokens * heads * dv)), sinks(size_t(heads)), slopes(size_t(heads)),
          k(k, cells, kv_heads, dk), v(v, cells, kv_heads, dv), mask(size_t(tokens * cells), kHidden) {
        for (float& x : q) x = normal();
        for (float& x : sinks) x = normal();
        for (float& x : slopes) x = std::fabs(normal());
    }

    Attention operation() {
        Attention a;
        a.tokens = tokens, a.heads = heads, a.kv_heads = kv_heads, a.dk = dk, a.dv = dv, a.cells = cells;
        a.q = q.data(), a.q_token = heads * dk, a.q_head = dk;
        a.k = k.view(), a.v = v.view();
        a.mask = mask.data(), a.mask_token = cells;
        a.out = out.data(), a.out_token = heads * dv, a.out_head = dv;
        a.scale = 1 / std::sqrt(float(dk)), a.softcap = softcap;
        a.sinks = has_sinks ? sinks.data() : nullptr, a.slopes = has_slopes ? slopes.data() : nullptr;
        return a;
    }

    void run(const Attention& a, int threads) {
        std::vector<char> memory(attention_bytes(a.tokens, a.heads, a.dv, a.cells, threads) + 64);
        void* at = reinterpret_cast<void*>((reinterpret_cast<size_t>(memory.data()) + 63) / 64 * 64);
        const AttentionStages& stages = *attention_stages();
        for (auto stage : {stages.scores, stages.weights, stages.values})
            for (int i = 0; i < threads; i++) stage(a, at, i, threads);
    }

    // In steps of `size` tokens by `threads`, one after the other.
    void run(int64_t size, int threads) {
        std::fill(out.begin(), out.end(), -1.0f);
        for (int64_t first = 0; first < tokens; first += size)
            run(operation().of_tokens(first, std::min(size, tokens - first)), threads);
    }

    void run_head_by_head(int64_t size) {
        std::fill(out.begin(), out.end(), -1.0f);
        for (int64_t head = 0; head < kv_heads; head++)
            for (int64_t first = 0; first < tokens; first += size)
                run(operation().of_head(head).of_tokens(first, std::min(size, tokens - first)), 1);
    }

    // As steps of several texts are split.
    void run_by_tiles(int64_t most) {
        std::fill(out.begin(), out.end(), -1.0f);
        const Tiles tiles(operation(), most);
        for (int64_t tile = 0; tile < tiles.count; tile++)
            run(operation().of_tokens(tiles.starts[tile], tiles.starts[tile + 1] - tiles.starts[tile]), 1);
    }

    double score(int64_t token, int64_t head, int64_t c) const {
        double score = 0;
        for (int64_t d = 0; d < dk; d++)
            score += double(q[size_t((token * heads + head) * dk + d)]) * k.value(c, head / (heads / kv_heads), d);
        score /= std::sqrt(double(dk));
        if (softcap != 0) score = softcap * std::tanh(score / softcap);
        return score + (has_slopes ? slopes[size_t(head)] : 1) * half_to_float(mask[size_t(token * cells + c)]);
    }

    std::vector<double> exact(int64_t token, int64_t head) const {
        std::vector<double> weights(size_t(cells), 0), result(size_t(dv), 0);
        double most = has_sinks ? sinks[size_t(head)] : -INFINITY, sum = 0;
        for (int64_t c = 0; c < cells; c++)
            if (mask[size_t(token * cells + c)] != kHidden) most = std::max(most, weights[size_t(c)] = score(token, head, c));
        for (int64_t c = 0; c < cells; c++) {
            bool seen = mask[size_t(token * cells + c)] != kHidden;
            double weight = seen ? std::exp(weights[size_t(c)] - most) : 0;
            sum += weight;
            for (int64_t d = 0; d < dv; d++) result[size_t(d)] += weight * v.value(c, head / (heads / kv_heads), d);
        }
        if (has_sinks) sum += std::exp(sinks[size_t(head)] - most);
        for (double& x : result) x = sum > 0 ? x / sum : 0;
        return result;
    }
};

static void expect(bool holds, const std::string& what, const Case& c) {
    if (holds) return;
    failures++;
    printf("%s: tokens %lld heads %lld/%lld size %lld/%lld types %d/%d cells %lld\n", what.c_str(), (long long)c.tokens,
           (long long)c.heads, (long long)c.kv_heads, (long long)c.dk, (long long)c.dv, int(c.k.type), int(c.v.type),
           (long long)c.cells);
}

static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The largest difference from float64, over the largest value.
static double error(const Case& c) {
    double worst = 0, most = 0;
    for (int64_t t = 0; t < c.tokens; t++) {
        for (int64_t h = 0; h < c.heads; h++) {
            std::vector<double> exact = c.exact(t, h);
            for (int64_t d = 0; d < c.dv; d++) {
                worst = std::max(worst, std::fabs(exact[size_t(d)] - c.out[size_t((t * c.heads + h) * c.dv + d)]));
                most = std::max(most, std::fabs(exact[size_t(d)]));
            }
        }
    }
    return worst / std::max(most, 1.0);
}

static void check_case(Case& c, const std::vector<std::string>& sets) {
    c.run(kAttentionTokens, 1);
    expect(error(c) < 1e-5, "far from float64", c);
    std::vector<float> before = c.out;
    for (int64_t size : {1, 2, 3, 5, 16}) {
        c.run(size, size == 2 ? 3 : 2);
        expect(same(before, c.out), "depends on the step or on threads", c);
    }
    c.run_head_by_head(6);
    expect(same(before, c.out), "depends on the split of heads", c);
    for (const std::string& set : sets) {
        choose(set.c_str());
        c.run(kAttentionTokens, 1);
        expect(same(before, c.out), set + " differs", c);
    }
    choose(sets[0].c_str());
}

// What a token does not see may hold anything: other texts in its step see it, or nobody does.
static void check_poison(Case& c, const std::vector<std::string>& sets) {
    c.run(1, 1);
    const std::vector<float> before = c.out;
    const int64_t token = between(0, c.tokens - 1), values = c.heads * c.dv;
    const float* ours = &before[size_t(token * values)];
    for (int64_t cell = 0; cell < c.cells; cell++)
        if (c.mask[size_t(token * c.cells + cell)] == kHidden) c.k.poison(cell), c.v.poison(cell);
    auto is_same = [&] { return memcmp(ours, &c.out[size_t(token * values)], size_t(values) * sizeof(float)) == 0; };
    for (const std::string& set : sets) {
        choose(set.c_str());
        for (int64_t size : {int64_t(1), kAttentionTokens, c.tokens}) {
            c.run(size, 2);
            expect(is_same(), set + ": a hidden cell reaches a token", c);
        }
        c.run_by_tiles(12);
        expect(is_same(), set + ": a hidden cell reaches a token of a tile", c);
    }
    choose(sets[0].c_str());
}

// The same seen cells with hidden ones between them: trees put other branches there.
static void check_gaps(int64_t dk, CacheType type) {
    Case plain(1, 3, 2, dk, type, 64, type, 64), gaps(1, 3, 2, dk, type, 64, type, 192);
    gaps.q = plain.q;
    const int64_t k = plain.k.view().cell, v = plain.v.view().cell;
    for (int64_t c = 0; c < plain.cells; c++) {
        int64_t at = c < 20 ? c : 2 * c + 37;
        plain.mask[size_t(c)] = gaps.mask[size_t(at)] = 0;
        memcpy(&gaps.k.bytes[size_t(at * k)], &plain.k.bytes[size_t(c * k)], size_t(k));
        memcpy(&gaps.v.bytes[size_t(at * v)], &plain.v.bytes[size_t(c * v)], size_t(v));
    }
    plain.run(1, 1);
    gaps.run(1, 1);
    expect(plain.out == gaps.out, "depends on where cells lie", gaps);
}

// Several texts in one cache, each a chain of `chain` tokens behind cells of its own that lie among those of others,
// and behind `alike` that all share.
static void check_texts(int64_t texts, int64_t chain, int64_t alike, int64_t own, int64_t most) {
    const int64_t cells = (alike + texts * (own + chain) + 95) / 32 * 32;
    Case c(texts * chain, 3, 2, 64, CacheType::f16, 64, CacheType::f16, cells);
    for (int64_t t = 0; t < c.tokens; t++) {
        uint16_t* mask = &c.mask[size_t(t * cells)];
        std::fill(mask, mask + alike, uint16_t(0));
        for (int64_t i = 0; i < own; i++) mask[alike + i * texts + t / chain] = 0;
        const int64_t first = alike + texts * own + t / chain * chain;
        std::fill(mask + first, mask + first + t % chain + 1, uint16_t(0));
    }
    c.run(1, 1);
    expect(error(c) < 1e-5, "texts: far from float64", c);
    const std::vector<float> alone = c.out;
    c.run(c.tokens, 2);
    expect(same(alone, c.out), "texts: depends on those of others", c);
    c.run_by_tiles(most);
    expect(same(alone, c.out), "texts: depends on tiles", c);
    const Tiles tiles(c.operation(), most);
    expect(tiles.texts == texts && tiles.count == texts * ((chain + most - 1) / most), "texts: other tiles", c);
    for (int64_t tile = 0; tile <= tiles.count; tile++)
        if (most >= chain) expect(tiles.starts[tile] == tile * chain, "texts: tiles begin elsewhere", c);
}

constexpr CacheType kTypes[] = {CacheType::f16, CacheType::bf16, CacheType::q8_0, CacheType::q4_0};

static void check_random(int i, const std::vector<std::string>& sets) {
    const int64_t sizes[] = {64, 80, 96, 128, 256, 512, 576};
    CacheType k = kTypes[i % 4], v = i % 5 ? kTypes[between(0, 3)] : k;
    int64_t dk = sizes[between(0, 6)], dv = dk == 576 ? 512 : i % 3 ? dk : 64;
    if (i % 4 >= 2 || int(v) >= 2) dk = dk == 80 ? 96 : dk, dv = dv == 80 ? 96 : dv;
    Case c(between(1, 17), between(1, 8), between(1, 4), dk, k, dv, v, 32 * between(1, 20));
    c.has_sinks = i % 4 == 0;
    c.has_slopes = i % 6 == 1;
    c.softcap = i % 7 == 1 ? 5 : 0;
    for (int64_t t = 0; t < c.tokens; t++)
        for (int64_t cell = 0; cell < c.cells; cell++)
            if (i % 5 ? cell <= c.cells - c.tokens + t : between(0, 3) == 0)
                c.mask[size_t(t * c.cells + cell)] = c.has_slopes ? uint16_t(0x8000 | between(0, 18) << 10) : 0;
    check_case(c, sets);
    check_poison(c, sets);
}

// 2,048 cells as 1.5B and 135M models have them.
static void times() {
    for (int64_t dk : {64, 128}) {
        for (CacheType type : kTypes) {
            printf("size %lld, type %d, ms:", (long long)dk, int(type));
            for (int64_t tokens : {1, 4, 8, 32}) {
                Case c(tokens, dk == 64 ? 3 : 6, dk == 64 ? 3 : 2, dk, type, dk, type, 2048);
                std::fill(c.mask.begin(), c.mask.end(), uint16_t(0));
                double best = 1e9;
                for (int i = 0; i < 20; i++) {
                    auto start = std::chrono::steady_clock::now();
                    if (tokens > kAttentionTokens) c.run_head_by_head(12);
                    else c.run(kAttentionTokens, 1);
                    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
                }
                printf("  n=%lld %.3f", (long long)tokens, best);
            }
            printf("\n");
        }
    }
}

int main(int count, char** arguments) {
    if (!attention_stages()) {
        printf("none here\n");
        return 0;
    }
    std::vector<std::string> sets = {chosen()};
    for (const char* set : {"avx512_vnni", "avx2", "neon_dotprod"})
        if (choose(set) && sets[0] != set) sets.push_back(set);
    choose(sets[0].c_str());
    printf("%s\n", sets[0].c_str());
    if (count > 1 && strcmp(arguments[1], "time") == 0) return times(), 0;
    const int cases = count > 1 ? atoi(arguments[1]) : 80;
    for (int i = 0; i < cases; i++) check_random(i, sets);
    for (int64_t dk : {64, 96, 128, 256, 576})
        for (CacheType type : kTypes) check_gaps(dk, type);
    check_texts(5, 1, 0, 40, 12);
    check_texts(8, 3, 64, 33, 12);
    check_texts(3, 30, 7, 50, 12);
    check_texts(1, 17, 0, 200, 16);
    const CacheType f16 = CacheType::f16;
    if (computes_attention(72, f16, 64, f16, 32) || computes_attention(64, f16, 64, f16, 48) ||
        computes_attention(640, f16, 64, f16, 32) || computes_attention(80, CacheType::q8_0, 80, f16, 32))
        printf("sizes without a product are taken\n"), failures++;
    printf("%d failures\n", failures);
    return failures != 0;
}
