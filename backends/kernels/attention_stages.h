// The stages of attention over vectors of floats, shared by all instruction sets. A file of attention defines a
// class of vectors V under its own target and then includes this file inside its namespace, as tile.h is.
//
// Both products are the same loop: rows of queries by keys that lie across, and rows of weights by values.

// What the stages of a pass hand on.
struct Pass {
    int64_t rows;    // of each group: tokens x heads that share a cache
    float* scores;   // [kv_heads][rows][cells]: scores, then weights
    float* sums;     // [kv_heads][rows][dv]: of weighted values
    float* inverse;  // [kv_heads][rows]: one over the sum of weights
    uint8_t* live;   // [cells / kCellBlock]: whether any token sees any cell of the block

    Pass(const Attention& a, void* memory)
        : rows(a.tokens * a.group()),
          scores(static_cast<float*>(memory)),
          sums(scores + a.kv_heads * rows * a.cells),
          inverse(sums + a.kv_heads * rows * a.dv),
          live(reinterpret_cast<uint8_t*>(inverse + a.kv_heads * rows)) {}

    float* score(const Attention& a, int64_t kv_head, int64_t r) const { return scores + (kv_head * rows + r) * a.cells; }
    float* sum(const Attention& a, int64_t kv_head, int64_t r) const { return sums + (kv_head * rows + r) * a.dv; }
};

// Token and head of a row of a group.
struct Row {
    int64_t token, head;

    Row(const Attention& a, int64_t kv_head, int64_t r) : token(r / a.group()), head(kv_head * a.group() + r % a.group()) {}
};

// One matrix of floats: rows of `stride`.
struct Floats {
    const float* at;
    int64_t stride;
};

// out[r][c] (+)= sum over i of a[r][i] x b[i][c], for R rows and W vectors of columns.
template <int R, int W>
INLINE void multiply_tile(Floats a, Floats b, int64_t count, bool adds, float* out, int64_t out_stride) {
    typename V::Float sums[R][W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) sums[r][w] = adds ? V::load(out + r * out_stride + w * V::lanes) : V::all(0.0f);
    // Three rows at one address and its stride: addresses of all rows would not fit the registers.
    const float* rows[(R + 2) / 3];
    for (int r = 0; r < R; r += 3) rows[r / 3] = a.at + r * a.stride;
    for (int64_t i = 0; i < count; i++, b.at += b.stride) {
        typename V::Float columns[W];
        for (int w = 0; w < W; w++) columns[w] = V::load(b.at + w * V::lanes);
        UNROLL for (int r = 0; r < R; r++) {
            typename V::Float one = V::all(rows[r / 3][r % 3 * a.stride]);
            for (int w = 0; w < W; w++) sums[r][w] = V::add_product(one, columns[w], sums[r][w]);
        }
        UNROLL for (int r = 0; r < R; r += 3) {
            rows[r / 3]++;
            asm("" : "+r"(rows[r / 3]));
        }
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) V::store(out + r * out_stride + w * V::lanes, sums[r][w]);
}

// The same for R rows and any number of columns, a multiple of the lanes.
template <int R>
void multiply_rows(Floats a, Floats b, int64_t count, int64_t columns, bool adds, float* out, int64_t out_stride) {
    int64_t c = 0;
    for (; c + 2 * V::lanes <= columns; c += 2 * V::lanes)
        multiply_tile<R, 2>(a, {b.at + c, b.stride}, count, adds, out + c, out_stride);
    if (c < columns) multiply_tile<R, 1>(a, {b.at + c, b.stride}, count, adds, out + c, out_stride);
}

using MultiplyRows = void (*)(Floats, Floats, int64_t, int64_t, bool, float*, int64_t);

template <int... R>
INLINE MultiplyRows rows_function(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr MultiplyRows functions[] = {multiply_rows<R + 1>...};
    return functions[rows - 1];
}

INLINE MultiplyRows rows_function(int64_t rows) {
    return rows_function(rows, std::make_integer_sequence<int, V::most_rows>());
}

// Calls `work(first, count)` for even tiles of at most V::most_rows of `rows` rows.
template <class Work>
INLINE void for_tiles(int64_t rows, Work work) {
    const int64_t tiles = (rows + V::most_rows - 1) / V::most_rows;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = rows * tile / tiles;
        work(first, rows * (tile + 1) / tiles - first);
    }
}

// e^x for x <= 0, to 2 units in the last place; 0 below -87.
INLINE V::Float exponential(V::Float x) {
    const V::Float n = V::round(V::times(x, V::all(1.44269504f)));
    V::Float r = V::add_product(n, V::all(-0.693359375f), x);
    r = V::add_product(n, V::all(2.12194440e-4f), r);
    V::Float p = V::all(1.0f / 720);
    for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = V::add_product(p, r, V::all(factor));
    return V::zero_below(V::times_power_of_2(p, n), x, -87.0f);
}

INLINE V::Float tanh(V::Float x) {
    const V::Float e = exponential(V::times(V::size(x), V::all(-2.0f)));
    return V::with_sign(V::divide(V::minus(V::all(1.0f), e), V::plus(V::all(1.0f), e)), x);
}

// 32 signed bytes x the block's scale.
INLINE void scaled_bytes(const int8_t* bytes, float scale, float* to) {
    for (int i = 0; i < 32; i += V::lanes) V::store(to + i, V::times(V::signed_bytes(bytes + i), V::all(scale)));
}

INLINE void read_q4_0(const char* block, float* to) {
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    Bytes pairs;
    memcpy(&pairs, block + 2, sizeof pairs);
    const Bytes halves[2] = {(pairs & 15) - 8, (pairs >> 4) - 8};
    int8_t bytes[32];
    memcpy(bytes, halves, sizeof bytes);
    scaled_bytes(bytes, V::half(block), to);
}

// Values [first, first + count) of one head of one cell.
INLINE void read_values(CacheType type, const char* at, int64_t first, int64_t count, float* to) {
    const int64_t blocks = count / 32;
    switch (type) {
        case CacheType::f16:
            for (int64_t i = 0; i < count; i += V::lanes) V::store(to + i, V::halves(at + 2 * (first + i)));
            return;
        case CacheType::bf16:
            for (int64_t i = 0; i < count; i += V::lanes) V::store(to + i, V::bf16(at + 2 * (first + i)));
            return;
        case CacheType::q8_0:
            at += first / 32 * 34;
            for (int64_t b = 0; b < blocks; b++, at += 34, to += 32)
                scaled_bytes(reinterpret_cast<const int8_t*>(at + 2), V::half(at), to);
            return;
        case CacheType::q4_0:
            at += first / 32 * 18;
            for (int64_t b = 0; b < blocks; b++, at += 18, to += 32) read_q4_0(at, to);
            return;
    }
}

constexpr int64_t stored_bytes(CacheType type, int64_t values) {
    return type == CacheType::q8_0 ? values / 32 * 34 : type == CacheType::q4_0 ? values / 32 * 18 : 2 * values;
}

// Asks for the same values of the next block of cells: they lie too far apart for processors to foresee it.
INLINE void prefetch_next(const Attention::Cache& cache, int64_t cell, int64_t head, int64_t first, int64_t count) {
    const char* next = cache.at(cell + kCellBlock, head) + stored_bytes(cache.type, first);
    for (int64_t at = 0; at < stored_bytes(cache.type, count); at += 64) __builtin_prefetch(next + at);
}

// Keys of a block of cells, across: to[dk][kCellBlock].
void read_keys(const Attention& a, int64_t kv_head, int64_t cell, float* to) {
    alignas(64) float keys[V::lanes * kMostHeadSize];
    for (int64_t c = 0; c < kCellBlock; c += V::lanes) {
        for (int64_t i = 0; i < V::lanes; i++) {
            prefetch_next(a.k, cell + c + i, kv_head, 0, a.dk);
            read_values(a.k.type, a.k.at(cell + c + i, kv_head), 0, a.dk, keys + i * a.dk);
        }
        for (int64_t d = 0; d < a.dk; d += V::lanes) V::transpose(keys + d, a.dk, to + d * kCellBlock + c, kCellBlock);
    }
}

bool is_live(const Attention& a, int64_t cell) {
    for (int64_t t = 0; t < a.tokens; t++)
        for (int64_t c = 0; c < kCellBlock; c++)
            if (a.mask[t * a.mask_token + cell + c] != 0xfc00) return true;
    return false;
}

// Queries of a tile's rows, which lie in steps of one stride within a token only.
INLINE Floats queries(const Attention& a, int64_t kv_head, int64_t first, int64_t count, float* copies) {
    const Row from(a, kv_head, first);
    const float* q = a.q + from.token * a.q_token + from.head * a.q_head;
    if (Row(a, kv_head, first + count - 1).token == from.token) return {q, a.q_head};
    for (int64_t r = 0; r < count; r++) {
        const Row row(a, kv_head, first + r);
        memcpy(copies + r * a.dk, a.q + row.token * a.q_token + row.head * a.q_head, size_t(a.dk) * sizeof(float));
    }
    return {copies, a.dk};
}

// From products of a block's keys to scores.
INLINE void finish_scores(const Attention& a, Row row, int64_t cell, float* scores) {
    const uint16_t* mask = a.mask + row.token * a.mask_token + cell;
    const V::Float slope = V::all(a.slopes ? a.slopes[row.head] : 1.0f);
    const V::Float scale = V::all(a.softcap != 0 ? a.scale / a.softcap : a.scale);
    for (int64_t c = 0; c < kCellBlock; c += V::lanes) {
        V::Float score = V::times(V::load(scores + c), scale);
        if (a.softcap != 0) score = V::times(tanh(score), V::all(a.softcap));
        V::store(scores + c, V::add_product(slope, V::halves(mask + c), score));
    }
}

void score_block(const Attention& a, const Pass& pass, int64_t kv_head, int64_t cell) {
    alignas(64) float keys[kMostHeadSize * kCellBlock], copies[V::most_rows * kMostHeadSize];
    read_keys(a, kv_head, cell, keys);
    for_tiles(pass.rows, [&](int64_t first, int64_t count) {
        float* scores = pass.score(a, kv_head, first) + cell;
        rows_function(count)(queries(a, kv_head, first, count, copies), {keys, kCellBlock}, a.dk, kCellBlock, false,
                             scores, a.cells);
        for (int64_t r = 0; r < count; r++) finish_scores(a, Row(a, kv_head, first + r), cell, scores + r * a.cells);
    });
}

// One row of scores: its weights e^(score - largest), and their sum in units of 2^-30, which is exact.
void weigh_row(const Attention& a, const Pass& pass, int64_t kv_head, int64_t r) {
    float* row = pass.score(a, kv_head, r);
    const int64_t blocks = a.cells / kCellBlock;
    V::Float largest = V::all(-INFINITY);
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t c = 0; pass.live[block] && c < kCellBlock; c += V::lanes)
            largest = V::max(largest, V::load(row + block * kCellBlock + c));
    float most = V::largest(largest);
    const float* sink = a.sinks ? a.sinks + Row(a, kv_head, r).head : nullptr;
    if (sink) most = std::max(most, *sink);
    if (most == -INFINITY) most = 0;
    V::Total total = V::none();
    for (int64_t block = 0; block < blocks; block++) {
        for (int64_t c = 0; pass.live[block] && c < kCellBlock; c += V::lanes) {
            float* at = row + block * kCellBlock + c;
            const V::Float weight = exponential(V::minus(V::load(at), V::all(most)));
            V::store(at, weight);
            total = V::add_rounded(total, V::times(weight, V::all(1 << 30)));
        }
    }
    float sum = float(double(V::integer(total)) / (1 << 30));
    if (sink) sum += std::exp(*sink - most);
    pass.inverse[kv_head * pass.rows + r] = sum > 0 ? 1 / sum : 0;
}

constexpr int64_t kSlice = 32;  // of a head's values

// Adds a block's weighted values to the sums, for one slice.
void add_values(const Attention& a, const Pass& pass, int64_t kv_head, int64_t slice, int64_t cell, bool adds) {
    alignas(64) float values[kCellBlock * kSlice];
    const int64_t at = slice * kSlice, width = std::min(kSlice, a.dv - at);
    for (int64_t c = 0; c < kCellBlock; c++) {
        prefetch_next(a.v, cell + c, kv_head, at, width);
        read_values(a.v.type, a.v.at(cell + c, kv_head), at, width, values + c * kSlice);
    }
    for_tiles(pass.rows, [&](int64_t first, int64_t count) {
        rows_function(count)({pass.score(a, kv_head, first) + cell, a.cells}, {values, kSlice}, kCellBlock, width, adds,
                             pass.sum(a, kv_head, first) + at, a.dv);
    });
}

void write_slice(const Attention& a, const Pass& pass, int64_t kv_head, int64_t slice) {
    const int64_t at = slice * kSlice, end = std::min(at + kSlice, a.dv);
    for (int64_t r = 0; r < pass.rows; r++) {
        const Row row(a, kv_head, r);
        const float inverse = pass.inverse[kv_head * pass.rows + r], *sums = pass.sum(a, kv_head, r);
        float* out = a.out + row.token * a.out_token + row.head * a.out_head;
        for (int64_t d = at; d < end; d++) out[d] = inverse == 0 ? 0 : sums[d] * inverse;
    }
}

// This thread's share of n units of work.
struct Share {
    int64_t first, end;

    Share(int64_t n, int64_t index, int64_t count) : first(n * index / count), end(n * (index + 1) / count) {}
};

// All heads of a block before the next block: caches are read from end to end.
void scores(const Attention& a, void* memory, int64_t index, int64_t count) {
    Pass pass(a, memory);
    const Share share(a.kv_heads * a.cells / kCellBlock, index, count);
    for (int64_t i = share.first; i < share.end; i++) {
        const int64_t block = i / a.kv_heads, kv_head = i % a.kv_heads;
        const bool live = is_live(a, block * kCellBlock);
        if (kv_head == 0) pass.live[block] = live;
        if (live) score_block(a, pass, kv_head, block * kCellBlock);
    }
}

void weights(const Attention& a, void* memory, int64_t index, int64_t count) {
    Pass pass(a, memory);
    const Share share(a.kv_heads * pass.rows, index, count);
    for (int64_t i = share.first; i < share.end; i++) weigh_row(a, pass, i / pass.rows, i % pass.rows);
}

// The order of cells is that of sums: threads share heads and slices of their values.
void values(const Attention& a, void* memory, int64_t index, int64_t count) {
    Pass pass(a, memory);
    const int64_t slices = (a.dv + kSlice - 1) / kSlice;
    const Share share(a.kv_heads * slices, index, count);
    bool adds = false;
    for (int64_t block = 0; block < a.cells / kCellBlock; block++) {
        if (!pass.live[block]) continue;
        for (int64_t i = share.first; i < share.end; i++)
            add_values(a, pass, i / slices, i % slices, block * kCellBlock, adds);
        adds = true;
    }
    for (int64_t i = share.first; i < share.end; i++) write_slice(a, pass, i / slices, i % slices);
}
