// The stages of attention over vectors of floats, shared by all instruction sets. A file of attention defines a
// class of vectors V under its own target and then includes this file inside its namespace, as tile.h is.
//
// Both products are the same loop: rows of queries by keys that lie across, and rows of weights by values.

// What the stages of a pass hand on. Each thread lists for itself what the tokens see: nobody waits for that.
struct Pass {
    int32_t* list;   // this thread's: the number of cells that any token sees, then these in order
    int32_t* seen;   // [cells]
    int64_t cells;   // whole blocks of them: the last one goes on with its last cell
    int64_t rows;    // of each group: tokens x heads that share a cache
    float* scores;   // [kv_heads][rows][cells]: scores, then weights
    float* sums;     // [kv_heads][rows][dv]: of weighted values
    float* inverse;  // [kv_heads][rows]: one over the sum of weights

    Pass(const Attention& a, void* memory, int64_t index, int64_t threads, bool is_new = false)
        : list(static_cast<int32_t*>(memory) + index * list_size(a.cells)),
          seen(list + kListHead),
          cells((is_new ? list_cells(a) : list[0] + kCellBlock - 1) / kCellBlock * kCellBlock),
          rows(a.tokens * a.group()),
          scores(static_cast<float*>(memory) + threads * list_size(a.cells)),
          sums(scores + a.kv_heads * rows * cells),
          inverse(sums + a.kv_heads * rows * a.dv) {}

    int64_t list_cells(const Attention& a) const;

    float* score(int64_t kv_head, int64_t r) const { return scores + (kv_head * rows + r) * cells; }
    float* sum(const Attention& a, int64_t kv_head, int64_t r) const { return sums + (kv_head * rows + r) * a.dv; }

    // Whether so many cells from a place of the list on follow each other in the cache.
    bool are_row(int64_t place, int64_t count) const {
        return place + count <= list[0] && seen[place + count - 1] - seen[place] == count - 1;
    }
};

// Fills the list; how many there are and what fills the last block.
inline int64_t Pass::list_cells(const Attention& a) const {
    int32_t count = 0;
    for (int64_t cell = 0; cell < a.cells; cell += kCellBlock) {
        uint16_t shown[kCellBlock] = {}, any = 0, all = 1;
        for (int64_t t = 0; t < a.tokens; t++)
            for (int64_t c = 0; c < kCellBlock; c++) shown[c] |= uint16_t(a.mask[t * a.mask_token + cell + c] ^ kHidden);
        for (int64_t c = 0; c < kCellBlock; c++) any |= shown[c], all &= shown[c] != 0;
        if (all) {
            for (int64_t c = 0; c < kCellBlock; c++) seen[count + c] = int32_t(cell + c);
            count += kCellBlock;
            continue;
        }
        for (int64_t c = 0; any && c < kCellBlock; c++) {
            seen[count] = int32_t(cell + c);
            count += shown[c] != 0;
        }
    }
    list[0] = count;
    const int32_t last = count ? seen[count - 1] : 0;
    for (; count % kCellBlock; count++) seen[count] = last;
    return count;
}

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

// Asks for values of one of the next cells: they lie too far apart for processors to foresee it.
INLINE void prefetch(CacheType type, const char* at, int64_t first, int64_t count) {
    const char* next = at + stored_bytes(type, first);
    for (int64_t i = 0; i < stored_bytes(type, count); i += 64) __builtin_prefetch(next + i);
}

// Calls `read(c, at)` for so many cells from a place of the list on: values [first, first + count) of a head are
// asked for a block ahead.
template <class Read>
INLINE void for_cells(const Pass& pass, const Attention::Cache& cache, int64_t head, int64_t place, int64_t cells,
                      int64_t first, int64_t count, Read read) {
    const int32_t* cell = pass.seen + place;
    const char* at = cache.at(cell[0], head);
    if (pass.are_row(place, cells)) {
        for (int64_t c = 0; c < cells; c++, at += cache.cell) {
            prefetch(cache.type, at + kCellBlock * cache.cell, first, count);
            read(c, at);
        }
        return;
    }
    const int64_t ahead = place + kCellBlock < pass.cells ? kCellBlock : 0;
    for (int64_t c = 0; c < cells; c++) {
        prefetch(cache.type, cache.at(cell[c + ahead], head), first, count);
        read(c, cache.at(cell[c], head));
    }
}

// Keys of the block of cells from a place of the list on, across: to[dk][kCellBlock].
void read_keys(const Attention& a, const Pass& pass, int64_t kv_head, int64_t place, float* to) {
    alignas(64) float keys[V::lanes * kMostHeadSize];
    for (int64_t c = 0; c < kCellBlock; c += V::lanes) {
        for_cells(pass, a.k, kv_head, place + c, V::lanes, 0, a.dk,
                  [&](int64_t i, const char* at) { read_values(a.k.type, at, 0, a.dk, keys + i * a.dk); });
        for (int64_t d = 0; d < a.dk; d += V::lanes) V::transpose(keys + d, a.dk, to + d * kCellBlock + c, kCellBlock);
    }
}

// What a block of the list has in a token's mask. Where its cells do not lie in one row, it is copied.
INLINE const uint16_t* masked(const Attention& a, const Pass& pass, int64_t token, int64_t place, uint16_t* copies) {
    const uint16_t* mask = a.mask + token * a.mask_token;
    const int32_t* cell = pass.seen + place;
    if (pass.are_row(place, kCellBlock)) return mask + cell[0];
    const int64_t count = std::min(kCellBlock, pass.list[0] - place);
    for (int64_t c = 0; c < kCellBlock; c++) copies[c] = c < count ? mask[cell[c]] : kHidden;
    return copies;
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

// From products of a block's keys to scores. Those of hidden cells are minus infinity whatever lies there: a NaN in
// the key of another text would be a NaN here, too.
INLINE void finish_scores(const Attention& a, Row row, const uint16_t* mask, float* scores) {
    const V::Float slope = V::all(a.slopes ? a.slopes[row.head] : 1.0f);
    const V::Float scale = V::all(a.softcap != 0 ? a.scale / a.softcap : a.scale);
    for (int64_t c = 0; c < kCellBlock; c += V::lanes) {
        V::Float score = V::times(V::load(scores + c), scale);
        if (a.softcap != 0) score = V::times(tanh(score), V::all(a.softcap));
        const V::Float gain = V::halves(mask + c);
        V::store(scores + c, V::add_product(slope, gain, V::zero_below(score, gain, -FLT_MAX)));
    }
}

void score_block(const Attention& a, const Pass& pass, int64_t kv_head, int64_t place) {
    alignas(64) float keys[kMostHeadSize * kCellBlock], copies[V::most_rows * kMostHeadSize];
    uint16_t mask_copies[kCellBlock];
    const uint16_t* mask = nullptr;
    int64_t token = -1;
    read_keys(a, pass, kv_head, place, keys);
    for_tiles(pass.rows, [&](int64_t first, int64_t count) {
        float* scores = pass.score(kv_head, first) + place;
        rows_function(count)(queries(a, kv_head, first, count, copies), {keys, kCellBlock}, a.dk, kCellBlock, false,
                             scores, pass.cells);
        for (int64_t r = 0; r < count; r++) {
            const Row row(a, kv_head, first + r);
            if (row.token != token) mask = masked(a, pass, token = row.token, place, mask_copies);
            finish_scores(a, row, mask, scores + r * pass.cells);
        }
    });
}

// One row of scores: its weights e^(score - largest), and their sum in units of 2^-30, which is exact.
void weigh_row(const Attention& a, const Pass& pass, int64_t kv_head, int64_t r) {
    float* row = pass.score(kv_head, r);
    V::Float largest = V::all(-INFINITY);
    for (int64_t c = 0; c < pass.cells; c += V::lanes) largest = V::max(largest, V::load(row + c));
    float most = V::largest(largest);
    const float* sink = a.sinks ? a.sinks + Row(a, kv_head, r).head : nullptr;
    if (sink) most = std::max(most, *sink);
    if (most == -INFINITY) most = 0;
    V::Total total = V::none();
    for (int64_t c = 0; c < pass.cells; c += V::lanes) {
        const V::Float weight = exponential(V::minus(V::load(row + c), V::all(most)));
        V::store(row + c, weight);
        total = V::add_rounded(total, V::times(weight, V::all(1 << 30)));
    }
    float sum = float(double(V::integer(total)) / (1 << 30));
    if (sink) sum += std::exp(*sink - most);
    pass.inverse[kv_head * pass.rows + r] = sum > 0 ? 1 / sum : 0;
}

constexpr int64_t kSlice = 32;  // of a head's values

// Whether a token does not see all cells of a block, which others do.
bool hides_cells(const Attention& a, const Pass& pass, int64_t place) {
    uint16_t copies[kCellBlock], hides = 0;
    for (int64_t t = 0; t < a.tokens; t++) {
        const uint16_t* mask = masked(a, pass, t, place, copies);
        for (int64_t c = 0; c < kCellBlock; c++) hides |= mask[c] == kHidden;
    }
    return hides;
}

// Whether all values of a slice are finite: anything else times zero is NaN.
INLINE bool are_finite(const float* values, int64_t width) {
    V::Float sum = V::all(0.0f);
    for (int64_t c = 0; c < kCellBlock; c++)
        for (int64_t i = 0; i < width; i += V::lanes)
            sum = V::add_product(V::load(values + c * kSlice + i), V::all(0.0f), sum);
    float sums[V::lanes];
    V::store(sums, sum);
    return std::all_of(sums, sums + V::lanes, [](float x) { return x == 0; });
}

// The same for a block with values that are not finite: a token adds zero for those that it does not see.
void add_seen_values(const Attention& a, const Pass& pass, int64_t kv_head, int64_t first, int64_t width,
                     int64_t place, const float* values) {
    alignas(64) float seen_values[kCellBlock * kSlice];
    uint16_t copies[kCellBlock];
    for (int64_t r = 0; r < pass.rows; r++) {
        const uint16_t* mask = masked(a, pass, Row(a, kv_head, r).token, place, copies);
        for (int64_t i = 0; i < kCellBlock * kSlice; i++)
            seen_values[i] = mask[i / kSlice] == kHidden && !std::isfinite(values[i]) ? 0 : values[i];
        rows_function(1)({pass.score(kv_head, r) + place, pass.cells}, {seen_values, kSlice}, kCellBlock, width,
                         place > 0, pass.sum(a, kv_head, r) + first, a.dv);
    }
}

// Adds a block's weighted values to the sums, for one slice. `hides`: a token does not see all of its cells.
void add_values(const Attention& a, const Pass& pass, int64_t kv_head, int64_t slice, int64_t place, bool hides) {
    alignas(64) float values[kCellBlock * kSlice];
    const int64_t first = slice * kSlice, width = std::min(kSlice, a.dv - first);
    for_cells(pass, a.v, kv_head, place, kCellBlock, first, width, [&](int64_t c, const char* at) {
        read_values(a.v.type, at, first, width, values + c * kSlice);
    });
    if (hides && !are_finite(values, width)) return add_seen_values(a, pass, kv_head, first, width, place, values);
    for_tiles(pass.rows, [&](int64_t r, int64_t count) {
        rows_function(count)({pass.score(kv_head, r) + place, pass.cells}, {values, kSlice}, kCellBlock, width, place > 0,
                             pass.sum(a, kv_head, r) + first, a.dv);
    });
}

void write_slice(const Attention& a, const Pass& pass, int64_t kv_head, int64_t slice) {
    const int64_t at = slice * kSlice, end = std::min(at + kSlice, a.dv);
    for (int64_t r = 0; r < pass.rows; r++) {
        const Row row(a, kv_head, r);
        const float inverse = pass.cells ? pass.inverse[kv_head * pass.rows + r] : 0, *sums = pass.sum(a, kv_head, r);
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
    const Pass pass(a, memory, index, count, true);
    const Share share(a.kv_heads * pass.cells / kCellBlock, index, count);
    for (int64_t i = share.first; i < share.end; i++) score_block(a, pass, i % a.kv_heads, i / a.kv_heads * kCellBlock);
}

void weights(const Attention& a, void* memory, int64_t index, int64_t count) {
    const Pass pass(a, memory, index, count);
    const Share share(a.kv_heads * pass.rows, index, count);
    for (int64_t i = share.first; i < share.end; i++) weigh_row(a, pass, i / pass.rows, i % pass.rows);
}

// The order of cells is that of sums: threads share heads and slices of their values.
void values(const Attention& a, void* memory, int64_t index, int64_t count) {
    const Pass pass(a, memory, index, count);
    const int64_t slices = (a.dv + kSlice - 1) / kSlice;
    const Share share(a.kv_heads * slices, index, count);
    for (int64_t place = 0; place < pass.cells; place += kCellBlock) {
        const bool hides = hides_cells(a, pass, place);
        for (int64_t i = share.first; i < share.end; i++) add_values(a, pass, i / slices, i % slices, place, hides);
    }
    for (int64_t i = share.first; i < share.end; i++) write_slice(a, pass, i / slices, i % slices);
}
