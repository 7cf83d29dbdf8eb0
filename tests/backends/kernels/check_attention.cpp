// Checks attention against float64, and that a token's result depends on what it sees alone.
// Prints each failure and, last, how many there were.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "attention.h"

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

static float to_float(uint16_t half) {
    int exponent = half >> 10 & 31, fraction = half & 1023;
    float value = exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24);
    return half >> 15 ? -value : value;
}

// A finite half of about the size of a normal variable.
static uint16_t some_half() { return uint16_t(between(0, 1) << 15 | between(5, 16) << 10 | between(0, 1023)); }

constexpr uint16_t kHidden = 0xfc00;

// A cache, queries, and who sees what.
struct Case {
    int64_t tokens, heads, kv_heads, dk, dv, cells;
    std::vector<float> q, out, sinks;
    std::vector<uint16_t> k, v, mask;
    bool has_sinks = false, k_is_bf16 = false;

    Case(int64_t tokens, int64_t group, int64_t kv_heads, int64_t dk, int64_t dv, int64_t cells)
        : tokens(tokens), heads(group * kv_heads), kv_heads(kv_heads), dk(dk), dv(dv), cells(cells),
          q(size_t(tokens * heads * dk)), out(size_t(tokens * heads * dv)), sinks(size_t(heads)),
          k(size_t(cells * kv_heads * dk)), v(size_t(cells * kv_heads * dv)), mask(size_t(tokens * cells), kHidden) {
        for (float& x : q) x = normal();
        for (float& x : sinks) x = normal();
        for (uint16_t& x : k) x = some_half();
        for (uint16_t& x : v) x = some_half();
    }

    Attention operation(int64_t first, int64_t count) {
        Attention a;
        a.tokens = count, a.heads = heads, a.kv_heads = kv_heads, a.dk = dk, a.dv = dv, a.cells = cells;
        a.q = q.data() + first * heads * dk, a.q_token = heads * dk, a.q_head = dk;
        a.k = reinterpret_cast<const char*>(k.data()), a.k_cell = kv_heads * dk * 2, a.k_head = dk * 2;
        a.k_is_bf16 = k_is_bf16;
        a.v = reinterpret_cast<const char*>(v.data()), a.v_cell = kv_heads * dv * 2, a.v_head = dv * 2;
        a.mask = mask.data() + first * cells, a.mask_token = cells;
        a.out = out.data() + first * heads * dv, a.out_token = heads * dv, a.out_head = dv;
        a.scale = 1 / std::sqrt(float(dk)), a.sinks = has_sinks ? sinks.data() : nullptr;
        return a;
    }

    // In steps of `size` tokens by `threads`, one after the other.
    void run(int64_t size, int threads) {
        std::vector<char> memory(attention_bytes(size, heads, cells) + 64);
        void* at = reinterpret_cast<void*>((reinterpret_cast<size_t>(memory.data()) + 63) / 64 * 64);
        for (int64_t first = 0; first < tokens; first += size) {
            Attention a = operation(first, std::min(size, tokens - first));
            for (auto stage : {attention_scores, attention_weights, attention_values})
                for (int i = 0; i < threads; i++) stage(a, at, i, threads);
        }
    }

    float key(uint16_t value) const { return k_is_bf16 ? bf16_to_float(value) : to_float(value); }

    std::vector<double> exact(int64_t token, int64_t head) const {
        std::vector<double> weights(size_t(cells), 0), result(size_t(dv), 0);
        double most = has_sinks ? sinks[size_t(head)] : -INFINITY, sum = 0;
        int64_t kv = head / (heads / kv_heads);
        for (int64_t c = 0; c < cells; c++) {
            if (mask[size_t(token * cells + c)] == kHidden) continue;
            double score = 0;
            for (int64_t d = 0; d < dk; d++)
                score += double(q[size_t((token * heads + head) * dk + d)]) * key(k[size_t((c * kv_heads + kv) * dk + d)]);
            weights[size_t(c)] = score / std::sqrt(double(dk));
            most = std::max(most, weights[size_t(c)]);
        }
        for (int64_t c = 0; c < cells; c++) {
            bool seen = mask[size_t(token * cells + c)] != kHidden;
            double weight = seen ? std::exp(weights[size_t(c)] - most) : 0;
            sum += weight;
            for (int64_t d = 0; d < dv; d++) result[size_t(d)] += weight * to_float(v[size_t((c * kv_heads + kv) * dv + d)]);
        }
        if (has_sinks) sum += std::exp(sinks[size_t(head)] - most);
        for (double& x : result) x = sum > 0 ? x / sum : 0;
        return result;
    }
};

static void expect(bool holds, const char* what, const Case& c) {
    if (holds) return;
    failures++;
    printf("%s: tokens %lld heads %lld/%lld size %lld/%lld cells %lld\n", what, (long long)c.tokens, (long long)c.heads,
           (long long)c.kv_heads, (long long)c.dk, (long long)c.dv, (long long)c.cells);
}

static void check_case(Case& c) {
    c.run(kAttentionTokens, 1);
    double worst = 0;
    for (int64_t t = 0; t < c.tokens; t++) {
        for (int64_t h = 0; h < c.heads; h++) {
            std::vector<double> exact = c.exact(t, h);
            for (int64_t d = 0; d < c.dv; d++)
                worst = std::max(worst, std::fabs(exact[size_t(d)] - c.out[size_t((t * c.heads + h) * c.dv + d)]));
        }
    }
    expect(worst < 2e-5, "far from float64", c);
    std::vector<float> before = c.out;
    for (int64_t size : {1, 2, 3, 5}) {
        c.run(size, size == 2 ? 3 : 2);
        expect(memcmp(before.data(), c.out.data(), before.size() * 4) == 0, "depends on the step or on threads", c);
    }
}

// The same seen cells with hidden ones between them: trees put other branches there.
static void check_gaps(int64_t dk) {
    Case plain(1, 3, 2, dk, 64, 64), gaps(1, 3, 2, dk, 64, 192);
    gaps.q = plain.q;
    for (int64_t c = 0; c < plain.cells; c++) {
        int64_t at = c < 20 ? c : 2 * c + 37;
        plain.mask[size_t(c)] = gaps.mask[size_t(at)] = 0;
        memcpy(&gaps.k[size_t(at * 2 * dk)], &plain.k[size_t(c * 2 * dk)], size_t(2 * dk) * 2);
        memcpy(&gaps.v[size_t(at * 128)], &plain.v[size_t(c * 128)], 256);
    }
    plain.run(1, 1);
    gaps.run(1, 1);
    expect(plain.out == gaps.out, "depends on where cells lie", gaps);
}

int main() {
    if (!computes_attention(64, 64, 16)) {
        printf("none here\n");
        return 0;
    }
    const int64_t sizes[] = {64, 80, 96, 128, 256};
    for (int i = 0; i < 60; i++) {
        int64_t dk = sizes[between(0, 4)], dv = i % 3 ? dk / 32 * 32 : 64;
        Case c(between(1, 8), between(1, 8), between(1, 4), dk, dv, 16 * between(1, 40));
        c.has_sinks = i % 4 == 0;
        if (i % 3 == 1) {
            c.k_is_bf16 = true;
            for (uint16_t& x : c.k) x = uint16_t(between(0, 1) << 15 | between(118, 128) << 7 | between(0, 127));
        }
        for (int64_t t = 0; t < c.tokens; t++)
            for (int64_t cell = 0; cell < c.cells; cell++)
                if (i % 5 ? cell <= c.cells - c.tokens + t : between(0, 3) == 0) c.mask[size_t(t * c.cells + cell)] = 0;
        check_case(c);
    }
    for (int64_t dk : sizes) check_gaps(dk);
    if (computes_attention(72, 64, 16) || computes_attention(64, 64, 24) || computes_attention(320, 64, 16)) failures++;
    printf("%d failures\n", failures);
    return failures != 0;
}
