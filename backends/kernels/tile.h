// The product over a vector of 16 rows, shared by all instruction sets. A file of products defines a class
// of vectors V (see avx512_vnni.cpp) under its own target and then includes this file inside its namespace,
// so that no code of one instruction set is linked into another's.

// Quad I of a group: 4 unsigned weights of 16 rows.
template <class V, class F, int I>
INLINE typename V::Bytes quad(const uint8_t* group) {
    constexpr int low_bits = F::traits.low_bits, high_bits = F::traits.high_bits;
    if constexpr (low_bits == 8) {
        return V::load(group + 64 * I);
    } else {
        constexpr int plane = low_bits == 4 ? I % 4 : I / 4, shift = low_bits == 4 ? I / 4 * 4 : I % 4 * 2;
        const auto low = V::masked(V::template left<-shift>(V::load(group + F::low + 64 * plane)), (1 << low_bits) - 1);
        if constexpr (F::traits.table_bits > 0) return V::lookup(F::traits.table, low);
        if constexpr (high_bits == 1)
            return V::with_bits(low, V::template left<low_bits - I>(V::load(group + F::high)), 1 << low_bits);
        if constexpr (high_bits == 2)
            return V::with_bits(low, V::template left<low_bits - I % 4 * 2>(V::load(group + F::high + 64 * (I / 4))), 3 << low_bits);
        return low;
    }
}

// What a column's integer sum starts with: unsigned weights are that much too large.
template <class V, class F>
INLINE int32_t start(const ActivationBlock& x, int half) {
    constexpr int offset = F::traits.offset;
    if constexpr (offset == 0 || (F::is_wide && V::signed_wide)) return 0;
    if constexpr (offset == 128) return x.less_128;
    if constexpr (F::has_halves) return x.less_32[half] / (32 / offset);
    if constexpr (offset >= 8) return x.less_8 * (offset / 8);
    return x.less_8 / (8 / offset);
}

// One quad for all columns and P panels before the next quad: sums do not wait for each other, and every
// broadcast of activations serves P panels. Panels lie `apart` bytes from each other.
template <class V, class F, int I, int P, int N>
INLINE void add_quad(const uint8_t* group, int64_t apart, const ActivationBlock* x, int64_t stride,
                     typename V::Int (*sums)[P]) {
    typename V::Bytes weights[P];
    for (int p = 0; p < P; p++) weights[p] = quad<V, F, I>(group + p * apart);
    UNROLL for (int t = 0; t < N; t++) {
        auto four = V::template quads_with<I>(x[t * stride].values);
        for (int p = 0; p < P; p++) sums[t][p] = V::template dot<F::is_wide, I>(sums[t][p], weights[p], four);
    }
}

template <class V, class F, int First, int P, int N, int... I>
INLINE void add_quads(const uint8_t* group, int64_t apart, const ActivationBlock* x, int64_t stride,
                      typename V::Int (*sums)[P], std::integer_sequence<int, I...>) {
    (add_quad<V, F, First + I, P, N>(group, apart, x, stride, sums), ...);
}

// Integer sums of quads from the first one on. Sets that add in 16 bits make them 32 bits wide before these overflow.
template <class V, class F, int First, int P, int N>
INLINE void sum_quads(const uint8_t* group, int64_t apart, const ActivationBlock* x, int64_t stride,
                      typename V::Int (*sums)[P]) {
    auto sum_before = [&](int t, int p) { return First ? sums[t][p] : V::all(start<V, F>(x[t * stride], 0)); };
    if constexpr (V::template in_pairs<F>) {
        constexpr int count = V::room(F::bits);
        typename V::Int pairs[N][P];
        UNROLL for (int t = 0; t < N; t++)
            for (int p = 0; p < P; p++) pairs[t][p] = V::all(0);
        add_quads<V, F, First, P, N>(group, apart, x, stride, pairs, std::make_integer_sequence<int, count>());
        UNROLL for (int t = 0; t < N; t++)
            for (int p = 0; p < P; p++) sums[t][p] = V::add_pairs(pairs[t][p], V::ones(), sum_before(t, p));
        if constexpr (First + count < 8) sum_quads<V, F, First + count, P, N>(group, apart, x, stride, sums);
    } else {
        UNROLL for (int t = 0; t < N; t++)
            for (int p = 0; p < P; p++) sums[t][p] = sum_before(t, p);
        add_quads<V, F, First, P, N>(group, apart, x, stride, sums, std::make_integer_sequence<int, 8>());
    }
}

// The scale of half a group.
template <class V, class F>
INLINE typename V::Float small_of(const uint8_t* group, int half) {
    const uint8_t* at = group + kRows * half;
    if constexpr (F::traits.small == Small::halves_e4m3) return V::e4m3(at);
    if constexpr (F::traits.small == Small::halves_with_minimum) return V::low_nibbles(at);
    return V::signed_bytes(at);
}

// Adds the sums of half a group by its small scale to `products`. Sets that add in 16 bits start with the offset, so
// that half a group has room there, and become 32 bits wide by the small scale itself where it is an integer.
template <class V, class F, int Half, bool Integers, int P, int N, class Product>
INLINE void add_half(const uint8_t* group, int64_t apart, const ActivationBlock* x, int64_t stride,
                     Product (*products)[P]) {
    typename V::Int sums[N][P];
    UNROLL for (int t = 0; t < N; t++)
        for (int p = 0; p < P; p++) {
            if constexpr (V::template in_pairs<F>)
                sums[t][p] = V::template starts<F::traits.offset>(x[t * stride].less_32[Half]);
            else
                sums[t][p] = V::all(start<V, F>(x[t * stride], Half));
        }
    add_quads<V, F, 4 * Half, P, N>(group, apart, x, stride, sums, std::make_integer_sequence<int, 4>());
    for (int p = 0; p < P; p++) {
        if constexpr (Integers) {
            const typename V::Int small = V::template small_pairs<F>(group + p * apart + kRows * Half);
            UNROLL for (int t = 0; t < N; t++)
                products[t][p] = V::add_pairs(sums[t][p], small, Half ? products[t][p] : V::all(0));
        } else {
            const typename V::Float small = small_of<V, F>(group + p * apart, Half);
            UNROLL for (int t = 0; t < N; t++) {
                if constexpr (V::template in_pairs<F>) sums[t][p] = V::add_pairs(sums[t][p], V::ones(), V::all(0));
                const typename V::Float sum = V::to_float(sums[t][p]);
                products[t][p] = Half ? V::add_product(sum, small, products[t][p]) : V::times(sum, small);
            }
        }
    }
}

// Products of a group and a block of N columns as floats; all are exact.
template <class V, class F, int P, int N>
INLINE void group_products(const uint8_t* group, int64_t apart, const ActivationBlock* x, int64_t stride,
                           typename V::Float (*to)[P]) {
    typename V::Int sums[N][P];
    if constexpr (!F::has_halves) {
        sum_quads<V, F, 0, P, N>(group, apart, x, stride, sums);
    } else if constexpr (V::template in_pairs<F> && F::traits.small != Small::halves_e4m3) {
        add_half<V, F, 0, true, P, N>(group, apart, x, stride, sums);
        add_half<V, F, 1, true, P, N>(group, apart, x, stride, sums);
    } else {
        add_half<V, F, 0, false, P, N>(group, apart, x, stride, to);
        add_half<V, F, 1, false, P, N>(group, apart, x, stride, to);
        return;
    }
    UNROLL for (int t = 0; t < N; t++)
        for (int p = 0; p < P; p++) to[t][p] = V::to_float(sums[t][p]);
}

// The scale of a block and group.
template <class V, class F>
INLINE typename V::Float scale_of(const uint8_t* block, const uint8_t* group) {
    constexpr Traits t = F::traits;
    if constexpr (t.scale == Scale::none) return V::all(kSmallFloats);
    if constexpr (t.scale == Scale::e8m0) return V::e8m0(block);
    if constexpr (t.small == Small::one) return V::times(V::halves(block), V::signed_bytes(group));
    if constexpr (t.small == Small::with_minimum) return V::times(V::halves(block), V::unsigned_bytes(group));
    return V::halves(block);
}

// What is added to the weights of half a group.
template <class V, class F>
INLINE typename V::Float minimum_of(const uint8_t* block, const uint8_t* group, int half) {
    const typename V::Float minimum = V::halves(block + F::minimum);
    if constexpr (F::traits.small == Small::with_minimum)
        return V::times(minimum, V::negative(V::unsigned_bytes(group + kRows)));
    if constexpr (F::has_halves) return V::times(minimum, V::negative(V::high_nibbles(group + kRows * half)));
    return minimum;
}

template <class F>
INLINE float sum_of(const ActivationBlock& x, int half) { return F::has_halves ? x.scaled_half[half] : x.scaled_sum; }

template <class V, class F, int P, int N>
INLINE void add_group(const uint8_t* block, int g, int64_t apart, const ActivationBlock* x, int64_t stride,
                      typename V::Float (*sums)[P]) {
    const uint8_t* group = block + F::header + g * F::group_bytes;
    typename V::Float values[N][P];
    // Some sets multiply two columns at once.
    if constexpr (V::pairs && N > 1)
        V::template group_products<F, N>(group, x, stride, values);
    else
        group_products<V, F, P, N>(group, apart, x, stride, values);
    for (int p = 0; p < P; p++, block += apart, group += apart) {
        typename V::Float scale = scale_of<V, F>(block, group);
        UNROLL for (int t = 0; t < N; t++)
            sums[t][p] = V::add_product(values[t][p], V::times(scale, V::all(x[t * stride].scale)), sums[t][p]);
        if constexpr (F::traits.has_minimum) {
            for (int half = 0; half < (F::has_halves ? 2 : 1); half++) {
                const typename V::Float minimum = minimum_of<V, F>(block, group, half);
                UNROLL for (int t = 0; t < N; t++)
                    sums[t][p] = V::add_product(minimum, V::all(sum_of<F>(x[t * stride], half)), sums[t][p]);
            }
        }
    }
}

template <class F, int cache = 3>
INLINE void prefetch_group(const uint8_t* ahead) {
    constexpr int bytes = F::group_bytes + F::header / F::groups;
    for (int line = 0; line < (bytes + 63) / 64; line++) __builtin_prefetch(ahead + 64 * line, 0, cache);
}

// P panels and N columns. Weights are unpacked once for all of them.
template <class V, class F, int P, int N>
void tile(const uint8_t* panel, int64_t blocks, Activations x, float* out, int64_t out_stride) {
    typename V::Float sums[N][P];
    UNROLL for (int t = 0; t < N; t++)
        for (int p = 0; p < P; p++) sums[t][p] = V::all(0.0f);
    const ActivationBlock* column = x.blocks;
    const int64_t apart = blocks * int64_t(F::bytes);
    constexpr Prefetch prefetch = prefetch_for(N);
    for (int64_t b = 0; b < blocks; b++, panel += F::bytes) {
        for (int g = 0; g < F::groups; g++, column++) {
            for (int p = 0; p < P; p++)
                prefetch_group<F, prefetch.cache>(panel + p * apart + g * F::group_bytes + prefetch.ahead);
            add_group<V, F, P, N>(panel, g, apart, column, x.stride, sums);
        }
    }
    UNROLL for (int t = 0; t < N; t++)
        for (int p = 0; p < P; p++) V::store(out + t * out_stride + p * kRows, sums[t][p]);
}

template <class V, class F, int P, int... N>
INLINE void tile_of(int64_t columns, std::integer_sequence<int, N...>, const uint8_t* panel, int64_t blocks,
                    Activations x, float* out, int64_t out_stride) {
    using Tile = void (*)(const uint8_t*, int64_t, Activations, float*, int64_t);
    static constexpr Tile tiles[] = {tile<V, F, P, N + 1>...};
    tiles[columns - 1](panel, blocks, x, out, out_stride);
}

template <class V, class F, int P>
void columns(const uint8_t* panel, int64_t blocks, Activations x, int64_t n, float* out, int64_t out_stride) {
    constexpr int widest = V::template widest<F>(P);
    // Even tiles: 9 columns of at most 8 are 5 and 4, not 8 and 1.
    for (int64_t tiles = (n + widest - 1) / widest; tiles > 0; tiles--) {
        int64_t size = (n + tiles - 1) / tiles;
        tile_of<V, F, P>(size, std::make_integer_sequence<int, widest>(), panel, blocks, x, out, out_stride);
        x.blocks += size * x.stride;
        out += size * out_stride;
        n -= size;
    }
}

// Columns whose activations stay in the second cache while all panels pass.
inline int64_t cached_columns(int64_t k) {
    int64_t fit = kCachedBytes / (k / 32 * int64_t(sizeof(ActivationBlock)));
    return fit < 16 ? 16 : fit / 8 * 8;
}

// Columns that fill more than one tile take two panels at a time, where registers have room for both. Fewer
// take one: what counts there is how fast weights come from memory, and a single stream comes faster. Vs are
// the parts of a panel's rows.
template <class F, class... Vs>
void multiply_columns(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n,
                      float* out, int64_t out_stride) {
    const int64_t blocks = k / F::columns, bytes = blocks * int64_t(F::bytes);
    if constexpr (std::min({Vs::template widest<F>(2)...}) > 0)
        for (; n > std::min({Vs::template widest<F>(1)...}) && first + 1 < end; first += 2)
            (columns<Vs, F, 2>(panels + first * bytes, blocks, x, n, out + first * kRows, out_stride), ...);
    for (; first < end; first++)
        (columns<Vs, F, 1>(panels + first * bytes, blocks, x, n, out + first * kRows, out_stride), ...);
}

template <class F, class... Vs>
void multiply(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n, float* out,
              int64_t out_stride) {
    const int64_t step = cached_columns(k);
    for (int64_t t = 0; t < n; t += step)
        multiply_columns<F, Vs...>(panels, first, end, k, {x.blocks + t * x.stride, x.stride}, std::min(step, n - t),
                                   out + t * out_stride, out_stride);
}

// A set's products: one for each type. Vs are the parts of a panel's rows.
template <class... Vs>
struct Products {
    template <class F>
    struct Of {
        static void run(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n,
                        float* out, int64_t out_stride) {
            multiply<F, Vs...>(panels, first, end, k, x, n, out, out_stride);
        }
    };
};
