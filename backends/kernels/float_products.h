// Products of weights that stay floats, over vectors of floats, shared by all instruction sets. A file that defines
// a class of vectors V (see attention_avx512.cpp) includes this file inside its namespace.
//
// The order of sums, for every number of rows and columns: partial sum i adds up the products of columns i, i + 16,
// i + 32 and so on, each with one rounding. Then the second half of the 16 is added to the first, the second half of
// these 8 to their first, until one is left.

constexpr int kPartials = 16;
constexpr int kParts = kPartials / V::lanes;              // vectors of partial sums of one result
constexpr int kFloatRegisters = 2 * V::most_rows;         // for partial sums
constexpr int kMostColumns = kParts == 1 ? 6 : 3;         // of a tile
constexpr int64_t kFloatBlockBytes = 256 << 10;           // of weights, which stay in the second cache

constexpr int most_rows(int columns) { return std::min(8, kFloatRegisters / (kParts * columns)); }

struct ReadF32 {
    static constexpr int bytes = 4;
    static INLINE V::Float vector(const uint8_t* at) { return V::load(reinterpret_cast<const float*>(at)); }
};
struct ReadF16 {
    static constexpr int bytes = 2;
    static INLINE V::Float vector(const uint8_t* at) { return V::halves(at); }
};
struct ReadBf16 {
    static constexpr int bytes = 2;
    static INLINE V::Float vector(const uint8_t* at) { return V::bf16(at); }
};

// The parts of a result's partial sums as one vector.
INLINE V::Float in_one_vector(const V::Float* parts) {
    V::Float sums[kParts];
    UNROLL for (int p = 0; p < kParts; p++) sums[p] = parts[p];
    UNROLL for (int width = kParts / 2; width > 0; width /= 2)
        UNROLL for (int p = 0; p < width; p++) sums[p] = V::plus(sums[p], sums[p + width]);
    return sums[0];
}

// The totals of 2 x Width vectors at once, in x[0]: each step halves the partial sums of a result, so that a vector
// has room for those of twice as many.
template <int Width>
INLINE void add_up(V::Float* x) {
    UNROLL for (int i = 0; i < Width; i++) x[i] = V::template fold<Width>(x[2 * i], x[2 * i + 1]);
    if constexpr (Width > 1) add_up<Width / 2>(x);
}

// Where the vector goes in whose total ends in this lane.
constexpr int place_of(int lane) { return lane / 4 + lane % 4 * (V::lanes / 4); }

// R rows of weights by N columns of x.
template <class W, int N, int R>
void float_tile(const uint8_t* rows, int64_t k, const float* x, int64_t x_stride, float* out, int64_t out_stride) {
    V::Float sums[R][N][kParts];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++)
            for (int p = 0; p < kParts; p++) sums[r][t][p] = V::all(0.0f);
    for (int64_t c = 0; c < k; c += kPartials) {
        UNROLL for (int p = 0; p < kParts; p++) {
            const int64_t at = c + p * V::lanes;
            V::Float columns[N];
            UNROLL for (int t = 0; t < N; t++) columns[t] = V::load(x + t * x_stride + at);
            UNROLL for (int r = 0; r < R; r++) {
                const V::Float row = W::vector(rows + (r * k + at) * W::bytes);
                UNROLL for (int t = 0; t < N; t++) sums[r][t][p] = V::add_product(row, columns[t], sums[r][t][p]);
            }
        }
    }
    constexpr int groups = (R * N + V::lanes - 1) / V::lanes;
    float totals[groups * V::lanes];
    UNROLL for (int g = 0; g < groups; g++) {
        V::Float group[V::lanes];
        UNROLL for (int lane = 0; lane < V::lanes; lane++) {
            const int i = g * V::lanes + lane;
            group[place_of(lane)] = i < R * N ? in_one_vector(sums[i % R][i / R]) : V::all(0.0f);
        }
        add_up<V::lanes / 2>(group);
        V::store(totals + g * V::lanes, group[0]);
    }
    for (int t = 0; t < N; t++) memcpy(out + t * out_stride, totals + t * R, R * sizeof(float));
}

using FloatTile = void (*)(const uint8_t*, int64_t, const float*, int64_t, float*, int64_t);

template <class W, int N, int... R>
INLINE FloatTile tile_of_rows(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr FloatTile tiles[] = {float_tile<W, N, R + 1>...};
    return tiles[rows - 1];
}

// All rows by N columns, in even tiles.
template <class W, int N>
void float_rows(const uint8_t* weights, int64_t rows, int64_t k, const float* x, int64_t x_stride, float* out,
                int64_t out_stride) {
    constexpr int most = most_rows(N);
    for (int64_t tiles = (rows + most - 1) / most; tiles > 0; tiles--) {
        const int64_t size = (rows + tiles - 1) / tiles;
        tile_of_rows<W, N>(size, std::make_integer_sequence<int, most>())(weights, k, x, x_stride, out, out_stride);
        weights += size * k * W::bytes;
        out += size;
        rows -= size;
    }
}

using FloatRows = void (*)(const uint8_t*, int64_t, int64_t, const float*, int64_t, float*, int64_t);

template <class W, int... N>
INLINE FloatRows rows_of_columns(int64_t columns, std::integer_sequence<int, N...>) {
    static constexpr FloatRows functions[] = {float_rows<W, N + 1>...};
    return functions[columns - 1];
}

// A block of rows stays in the second cache while all columns pass.
template <class W>
void multiply_floats(const uint8_t* weights, int64_t first, int64_t end, int64_t k, const float* x, int64_t x_stride,
                     int64_t n, float* out, int64_t out_stride) {
    const int64_t block = std::max<int64_t>(8, kFloatBlockBytes / (k * W::bytes) / 8 * 8);
    for (; first < end; first += block) {
        const int64_t rows = std::min(block, end - first);
        for (int64_t t = 0, size; t < n; t += size) {
            const int64_t tiles = (n - t + kMostColumns - 1) / kMostColumns;
            size = (n - t + tiles - 1) / tiles;
            rows_of_columns<W>(size, std::make_integer_sequence<int, kMostColumns>())(
                weights + first * k * W::bytes, rows, k, x + t * x_stride, x_stride, out + t * out_stride + first,
                out_stride);
        }
    }
}

constexpr FloatProducts kProducts = {multiply_floats<ReadF32>, multiply_floats<ReadF16>, multiply_floats<ReadBf16>};
