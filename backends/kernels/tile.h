// The product over a vector of 16 rows, shared by all instruction sets. A file of products defines a class
// of vectors V (see avx512_vnni.cpp) under its own target and then includes this file inside its namespace,
// so that no code of one instruction set is linked into another's.

// Weights of one group, unpacked for all columns of a tile.
template <class V>
struct Group {
    typename V::Bytes quads[8];
    typename V::Float scale, minimum;
    typename V::Int small[2];
};

template <class V, class F>
INLINE void unpack_high(const uint8_t* group, Group<V>& to) {
    typename V::Bytes bits = V::load(group + F::high);
    if constexpr (F::type == Q5_K::type) {
        to.quads[0] = V::with_bits(to.quads[0], V::template left<4>(bits), 0x10);
        to.quads[1] = V::with_bits(to.quads[1], V::template left<3>(bits), 0x10);
        to.quads[2] = V::with_bits(to.quads[2], V::template left<2>(bits), 0x10);
        to.quads[3] = V::with_bits(to.quads[3], V::template left<1>(bits), 0x10);
        to.quads[4] = V::with_bits(to.quads[4], bits, 0x10);
        to.quads[5] = V::with_bits(to.quads[5], V::template right<1>(bits), 0x10);
        to.quads[6] = V::with_bits(to.quads[6], V::template right<2>(bits), 0x10);
        to.quads[7] = V::with_bits(to.quads[7], V::template right<3>(bits), 0x10);
    } else {
        for (int half = 0; half < 2; half++) {
            typename V::Bytes* quads = to.quads + 4 * half;
            bits = V::load(group + F::high + 64 * half);
            quads[0] = V::with_bits(quads[0], V::template left<4>(bits), 0x30);
            quads[1] = V::with_bits(quads[1], V::template left<2>(bits), 0x30);
            quads[2] = V::with_bits(quads[2], bits, 0x30);
            quads[3] = V::with_bits(quads[3], V::template right<2>(bits), 0x30);
        }
    }
}

template <class V, class F>
INLINE void unpack_values(const uint8_t* group, Group<V>& to) {
    if constexpr (F::type == Q8_0::type) {
        for (int i = 0; i < 8; i++) to.quads[i] = V::load(group + 64 * i);
        return;
    }
    for (int i = 0; i < 4; i++) {
        typename V::Bytes pair = V::load(group + F::low + 64 * i);
        to.quads[i] = V::masked(pair, 15);
        to.quads[i + 4] = V::masked(V::template right<4>(pair), 15);
    }
    if constexpr (F::type == IQ4_NL::type)
        for (int i = 0; i < 8; i++) to.quads[i] = V::lookup(kIq4nl, to.quads[i]);
    if constexpr (F::high < F::group_bytes) unpack_high<V, F>(group, to);
}

template <class V, class F>
INLINE void unpack(const uint8_t* block, int g, Group<V>& to) {
    const uint8_t* group = block + F::header + g * F::group_bytes;
    unpack_values<V, F>(group, to);
    to.scale = V::halves(block);
    if constexpr (F::header == 64) to.minimum = V::halves(block + 32);
    if constexpr (F::type == Q6_K::type) {
        to.small[0] = V::signed_bytes(group);
        to.small[1] = V::signed_bytes(group + 16);
    } else if constexpr (F::groups > 1) {
        to.scale = V::times(to.scale, V::to_float(V::unsigned_bytes(group)));
        to.minimum = V::times(to.minimum, V::to_float(V::negative(V::unsigned_bytes(group + 16))));
    }
}

// Integer product of a group and a block of one column.
template <class V, class F>
INLINE typename V::Int product(const Group<V>& w, const ActivationBlock& x) {
    if constexpr (F::type == Q8_0::type || F::type == IQ4_NL::type) return V::template dot_wide<0, 8>(w.quads, x, x.less_128);
    if constexpr (F::type == Q6_K::type)
        return V::scaled_sum(V::template dot<0, 4>(w.quads, x, x.less_32[0]), w.small[0],
                             V::template dot<4, 8>(w.quads, x, x.less_32[1]), w.small[1]);
    return V::template dot<0, 8>(w.quads, x, F::type == Q4_0::type ? x.less_8 : 0);
}

// One panel and N columns. Weights are unpacked once for all of them.
template <class V, class F, int N>
void tile(const uint8_t* panel, int64_t blocks, Activations x, float* out, int64_t out_stride) {
    typename V::Float sums[N];
    for (int t = 0; t < N; t++) sums[t] = V::zero();
    for (int64_t b = 0; b < blocks; b++, panel += F::bytes) {
        for (int g = 0; g < F::groups; g++) {
            const char* ahead = reinterpret_cast<const char*>(panel + g * F::group_bytes + kPrefetch);
            for (int line = 0; line < (F::group_bytes + F::header / F::groups + 63) / 64; line++)
                __builtin_prefetch(ahead + 64 * line);
            Group<V> w;
            unpack<V, F>(panel, g, w);
            for (int t = 0; t < N; t++) {
                const ActivationBlock& block = x.blocks[t * x.stride + b * F::groups + g];
                typename V::Float value = V::to_float(product<V, F>(w, block));
                sums[t] = V::add_product(value, V::times(w.scale, V::all(block.scale)), sums[t]);
                if constexpr (F::header == 64) sums[t] = V::add_product(w.minimum, V::all(block.scaled_sum), sums[t]);
            }
        }
    }
    for (int t = 0; t < N; t++) V::store(out + t * out_stride, sums[t]);
}

template <class V, class F>
void columns(const uint8_t* panel, int64_t blocks, Activations x, int64_t n, float* out, int64_t out_stride) {
    using Tile = void (*)(const uint8_t*, int64_t, Activations, float*, int64_t);
    static constexpr Tile tiles[] = {tile<V, F, 1>, tile<V, F, 2>, tile<V, F, 3>, tile<V, F, 4>,
                                     tile<V, F, 5>, tile<V, F, 6>, tile<V, F, 7>, tile<V, F, 8>};
    for (int64_t left = n; left > 0;) {
        // Even tiles: 9 columns are 5 and 4, not 8 and 1.
        int64_t size = (left + (left + 7) / 8 - 1) / ((left + 7) / 8);
        tiles[size - 1](panel, blocks, x, out, out_stride);
        x.blocks += size * x.stride;
        out += size * out_stride;
        left -= size;
    }
}

// Columns whose activations stay in the second cache while all panels pass.
inline int64_t cached_columns(int64_t k) {
    int64_t fit = kCachedBytes / (k / 32 * int64_t(sizeof(ActivationBlock)));
    return fit < 16 ? 16 : fit / 8 * 8;
}

template <class V, class F>
void multiply(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n, float* out,
              int64_t out_stride) {
    int64_t blocks = k / F::columns, step = cached_columns(k);
    for (int64_t t = 0; t < n; t += step)
        for (int64_t p = first; p < end; p++)
            columns<V, F>(panels + p * blocks * F::bytes, blocks, {x.blocks + t * x.stride, x.stride},
                          n - t < step ? n - t : step, out + t * out_stride + p * kRows, out_stride);
}
