// Checks every product on this processor against the scalar reference, bit by bit, and the reference against
// ggml's own dequantization where its library is given. Exit status 1 and a line for what differs.
// With "time" as the second argument: milliseconds of one thread by type and number of columns.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "products.h"

using namespace edgespec;

static int failures = 0;
static std::mt19937 random_bits(7);

static void expect(bool good, const std::string& what) {
    if (!good) printf("FAILED %s\n", what.c_str()), failures++;
}

// `halves`: where f16 scales are in a block.
struct Type { int type; const char* dequantize; std::vector<int> halves; };
static const Type kTypes[] = {
    {2, "dequantize_row_q4_0", {0}},       {3, "dequantize_row_q4_1", {0, 2}},    {6, "dequantize_row_q5_0", {0}},
    {7, "dequantize_row_q5_1", {0, 2}},    {8, "dequantize_row_q8_0", {0}},       {10, "dequantize_row_q2_K", {80, 82}},
    {11, "dequantize_row_q3_K", {108}},    {12, "dequantize_row_q4_K", {0, 2}},   {13, "dequantize_row_q5_K", {0, 2}},
    {14, "dequantize_row_q6_K", {208}},    {20, "dequantize_row_iq4_nl", {0}},    {23, "dequantize_row_iq4_xs", {0}},
    {35, "dequantize_row_tq2_0", {64}},    {39, "dequantize_row_mxfp4", {}},      {40, "dequantize_row_nvfp4", {}},
    {42, "dequantize_row_q2_0", {0}}};
constexpr int kMxfp4 = 39;

// Types of floats, and the bytes of one.
struct Floats { int type, bytes; };
static const Floats kFloats[] = {{0, 4}, {1, 2}, {30, 2}};

// Random bytes are valid weights but for their f16 scales, which become finite ones of either sign.
static std::vector<uint8_t> weights(const Type& type, const Format& format, int64_t rows, int64_t k) {
    std::vector<uint8_t> file(rows * format.row_bytes(k));
    for (uint8_t& byte : file) byte = uint8_t(random_bits());
    for (size_t b = 0; b < file.size(); b += format.file_block_bytes)
        for (int at : type.halves) file[b + at + 1] = (file[b + at + 1] & 0x83) | 0x20;
    // Exponents whose sums are finite.
    for (size_t b = 0; type.type == kMxfp4 && b < file.size(); b += format.file_block_bytes) file[b] = 100 + file[b] % 56;
    return file;
}

struct Memory {
    void* at;
    explicit Memory(size_t bytes) : at(aligned_alloc(64, (bytes + 63) / 64 * 64)) { memset(at, 0, bytes); }
    ~Memory() { free(at); }
};

static std::vector<float> columns(int64_t k, int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> x(k * n);
    for (float& value : x) value = normal(random_bits);
    for (int i = 0; i < 32; i++) x[i] = 0;
    return x;
}

static std::vector<float> product(const Format& format, const std::vector<uint8_t>& file, int64_t rows, int64_t k,
                                  const std::vector<float>& x, int64_t n, int64_t split) {
    std::vector<uint8_t> panels(rows / format.panel_rows * format.panel_bytes(k));
    int64_t half = split * format.panel_rows;
    pack(format, file.data(), half, k, panels.data());
    pack(format, file.data() + half * format.row_bytes(k), rows - half, k, panels.data() + split * format.panel_bytes(k));
    Memory memory(activation_bytes(k, n));
    Activations to = activations_at(memory.at, k);
    quantize(x.data(), k, 0, n, k, to);
    std::vector<float> out(n * (rows + 3));
    format.multiply(panels.data(), 0, split, k, to, n, out.data(), rows + 3);
    format.multiply(panels.data(), split, rows / format.panel_rows, k, to, n, out.data(), rows + 3);
    return out;
}

static void against_ggml(void* library, const Type& type, const Format& format, const std::vector<uint8_t>& file,
                         int64_t rows, int64_t k, const std::vector<float>& x, int64_t n, const std::vector<float>& out) {
    auto dequantize = (void (*)(const void*, float*, int64_t))dlsym(library, type.dequantize);
    expect(dequantize, type.dequantize);
    if (!dequantize) return;
    std::vector<float> row(k), unpacked(k);
    std::vector<uint8_t> panels(rows / format.panel_rows * format.panel_bytes(k));
    pack(format, file.data(), rows, k, panels.data());
    double difference = 0, size = 0;
    for (int64_t r = 0; r < rows; r++) {
        dequantize(file.data() + r * format.row_bytes(k), row.data(), k);
        unpack_row(format, panels.data(), r, k, unpacked.data());
        for (int64_t c = 0; c < k; c++)
            expect(std::fabs(row[c] - unpacked[c]) <= 1e-6 * std::fabs(row[c]), std::string(format.name) + ": a value of a row is not ggml's");
        for (int64_t t = 0; t < n; t++) {
            double exact = 0;
            for (int64_t c = 0; c < k; c++) exact += double(row[c]) * x[t * k + c];
            difference += std::pow(exact - out[t * (rows + 3) + r], 2);
            size += exact * exact;
        }
    }
    double error = std::sqrt(difference / size);
    expect(error < 0.015, std::string(format.name) + " against ggml: " + std::to_string(error));
}

// Equal bits; what is not a number is that in both, with whatever bits.
static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); i++)
        if (memcmp(&a[i], &b[i], 4) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
    return a.size() == b.size();
}

static void check(void* library, const std::string& best, const Type& type, int64_t rows, int64_t k, int64_t n) {
    choose("scalar");
    const Format* scalar = find(type.type, rows, k);
    if (!scalar) return;
    std::vector<uint8_t> file = weights(type, *scalar, rows, k);
    std::vector<float> x = columns(k, n), truth = product(*scalar, file, rows, k, x, n, 0);
    if (library) against_ggml(library, type, *scalar, file, rows, k, x, n, truth);
    choose(best.c_str());
    const Format* format = find(type.type, rows, k);
    std::string what = std::string(format->name) + " " + std::to_string(rows) + "x" + std::to_string(k) + " n=" + std::to_string(n);
    int64_t split = random_bits() % (rows / format->panel_rows + 1);
    std::vector<float> ours = product(*format, file, rows, k, x, n, split);
    expect(same(truth, ours), what + " differs from the reference");
}

// Weights of floats: small ones of either sign. Rows need not be a multiple of anything.
static std::vector<uint8_t> float_weights(const Floats& floats, int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<uint8_t> file(size_t(count * floats.bytes));
    for (int64_t i = 0; i < count; i++) {
        const float value = normal(random_bits);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        // Of f16, any finite number; of bf16, the upper half.
        if (floats.type == 1) bits = random_bits() & 0xbfff;
        if (floats.type == 30) bits >>= 16;
        memcpy(&file[size_t(i * floats.bytes)], &bits, size_t(floats.bytes));
    }
    return file;
}

static std::vector<float> float_product(const Format& format, const std::vector<uint8_t>& file, int64_t rows, int64_t k,
                                        const std::vector<float>& x, int64_t n, int64_t split, int64_t x_stride) {
    std::vector<uint8_t> kept(size_t(rows) * format.panel_bytes(k));
    pack(format, file.data(), rows, k, kept.data());
    std::vector<float> out(size_t(n * (rows + 3)));
    format.multiply_floats(kept.data(), 0, split, k, x.data(), x_stride, n, out.data(), rows + 3);
    format.multiply_floats(kept.data(), split, rows, k, x.data(), x_stride, n, out.data(), rows + 3);
    return out;
}

static void check_floats(const std::string& best, const Floats& floats, int64_t rows, int64_t k, int64_t n, bool unusual) {
    const int64_t x_stride = k + 5;
    std::vector<uint8_t> file = float_weights(floats, rows * k);
    std::vector<float> x = columns(x_stride, n);
    if (unusual) x[3] = NAN, x[x_stride + 1] = INFINITY, x[2 * x_stride] = 1e-40f, x[3 * x_stride + 2] = 3.4e38f;
    choose("scalar");
    std::vector<float> truth = float_product(*find(floats.type, rows, k), file, rows, k, x, n, 0, x_stride);
    choose(best.c_str());
    const Format* format = find(floats.type, rows, k);
    const std::string what = std::string(format->name) + " " + std::to_string(rows) + "x" + std::to_string(k) + " n=" + std::to_string(n);
    std::vector<float> ours = float_product(*format, file, rows, k, x, n, int64_t(random_bits() % uint64_t(rows + 1)), x_stride);
    expect(same(truth, ours), what + " differs from the reference");
    double exact = 0;
    std::vector<float> row(size_t(k), 0);
    unpack_row(*format, file.data(), rows - 1, k, row.data());
    for (int64_t c = 0; c < k; c++) exact += double(row[size_t(c)]) * x[size_t((n - 1) * x_stride + c)];
    double size = 0;
    for (int64_t c = 0; c < k; c++) size += std::abs(double(row[size_t(c)]) * x[size_t((n - 1) * x_stride + c)]);
    if (!unusual) expect(std::abs(truth[size_t((n - 1) * (rows + 3) + rows - 1)] - exact) <= 1e-5 * size, what + " is not the sum");
}

// Columns of: ordinary values and one that is not a number; an infinity; nothing but zeros; but denormals; the
// largest floats; ordinary ones for the rest.
static std::vector<float> unusual_columns(int64_t k, int64_t n) {
    std::vector<float> x = columns(k, n);
    x[k / 2 + 5] = NAN;
    x[k + 7] = -INFINITY;
    for (int64_t i = 0; i < k; i++) x[2 * k + i] = 0, x[3 * k + i] = 1e-40f, x[4 * k + i] = i % 2 ? 3.4e38f : -3.4e38f;
    return x;
}

static void check_unusual(const std::string& best, const Type& type, int64_t n) {
    const int64_t rows = 32, k = 512;
    choose("scalar");
    const Format* scalar = find(type.type, rows, k);
    std::vector<uint8_t> file = weights(type, *scalar, rows, k);
    std::vector<float> x = unusual_columns(k, n), truth = product(*scalar, file, rows, k, x, n, 1);
    choose(best.c_str());
    const Format* format = find(type.type, rows, k);
    const std::string what = std::string(format->name) + " n=" + std::to_string(n);
    std::vector<float> ours = product(*format, file, rows, k, x, n, 1);
    expect(same(truth, ours), what + " differs for unusual activations");
    for (int64_t r = 0; r < rows; r++) {
        expect(std::isnan(ours[r]) && std::isnan(ours[rows + 3 + r]), what + ": what is not finite stays so");
        expect(ours[2 * (rows + 3) + r] == 0 && ours[3 * (rows + 3) + r] == 0, what + ": nothing is zero");
        expect(std::isfinite(ours[5 * (rows + 3) + r]), what + ": other columns are not touched");
    }
    if (type.type == kMxfp4)
        for (size_t b = 0; b < file.size(); b += format->file_block_bytes) file[b] = uint8_t(random_bits() % 2 ? random_bits() : random_bits() % 4);
    // Scales that are zero, the smallest denormal, infinite and not a number.
    const uint16_t scales[] = {0, 0x8000, 1, 0x7c00, 0xfc00, 0x7e01};
    for (size_t b = 0; b < file.size(); b += format->file_block_bytes)
        for (int at : type.halves) memcpy(&file[b + at], &scales[random_bits() % 6], 2);
    choose("scalar");
    truth = product(*scalar, file, rows, k, x, n, 1);
    choose(best.c_str());
    expect(same(truth, product(*format, file, rows, k, x, n, 1)), what + " differs for unusual scales");
}

// Runs of equal bytes, most of them the lowest and the highest, and activations of one size: sums as large as they get.
static void check_largest(const std::string& best, const Type& type) {
    const int64_t rows = 32, k = 512, n = 6;
    choose("scalar");
    const Format* scalar = find(type.type, rows, k);
    std::vector<uint8_t> file = weights(type, *scalar, rows, k), given = file;
    for (size_t b = 0; b < file.size(); b += scalar->file_block_bytes) {
        for (size_t run = 0; run < scalar->file_block_bytes; run += 8) {
            const uint32_t drawn = random_bits() % 4;
            for (size_t at = run; at < std::min(run + 8, scalar->file_block_bytes); at++)
                if (drawn < 3) file[b + at] = drawn == 0 ? 0 : drawn == 1 ? 0xff : 0x80;
        }
        for (int at : type.halves) memcpy(&file[b + at], &given[b + at], 2);
        if (type.type == kMxfp4) file[b] = given[b];
    }
    std::vector<float> x(k * n, 1);
    for (int64_t i = 0; i < k; i++) x[k + i] = -1, x[2 * k + i] = i % 4 < 2 ? 1 : -1, x[3 * k + i] = i % 2 ? 1 : -1;
    std::vector<float> truth = product(*scalar, file, rows, k, x, n, 1);
    choose(best.c_str());
    const Format* format = find(type.type, rows, k);
    expect(same(truth, product(*format, file, rows, k, x, n, 1)), std::string(format->name) + " differs at the largest");
}

static double milliseconds(const Format& format, int64_t rows, int64_t k, int64_t n) {
    Memory panels(rows / format.panel_rows * format.panel_bytes(k)), memory(activation_bytes(k, n));
    Activations to = activations_at(memory.at, k);
    std::vector<float> x = columns(k, n), out(n * rows);
    double best = 1e9;
    for (int i = 0; i < 4; i++) {
        auto start = std::chrono::steady_clock::now();
        quantize(x.data(), k, 0, n, k, to);
        format.multiply((uint8_t*)panels.at, 0, rows / format.panel_rows, k, to, n, out.data(), rows);
        best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

// Matrices of 64 MiB and more, so that weights come from memory.
static void times() {
    for (const Type& type : kTypes) {
        const Format* format = find(type.type, 73728, 1536);
        double mib = 73728 / 16 * double(format->panel_bytes(1536)) / 1048576;
        printf("%-7s %5.0f MiB ms:", format->name, mib);
        for (int n : {1, 2, 4, 8, 16, 32}) {
            double ms = milliseconds(*format, 73728, 1536, n);
            printf("  n=%d %.2f", n, ms);
            if (n == 1) printf(" (%.1f GB/s)", mib * 1.048576 / ms);
        }
        printf("\n");
        fflush(stdout);
    }
}

int main(int count, char** arguments) {
    void* library = count > 1 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
    std::string best = chosen();
    printf("instructions: %s, ggml: %s\n", best.c_str(), library ? "yes" : "no");
    const char* wanted = getenv("EDGESPEC_KERNELS_ISA");
    if (wanted && *wanted && best != wanted) return 0;  // this processor has others
    if (count > 2 && strcmp(arguments[2], "time") == 0) return times(), 0;
    for (const Type& type : kTypes) {
        expect(!find(type.type, 24, 256) && !find(type.type, 16, 40) && !find(type.type, 0, 256), "odd sizes are refused");
        for (int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 33})
            check(library, best, type, 16 * (1 + random_bits() % 5), 256 * (1 + random_bits() % 6), n);
        check(library, best, type, 32, 32 * (1 + random_bits() % 60), 3);
        check(library, best, type, 32, 8960, 41);
        for (int64_t n : {6, 14}) check_unusual(best, type, n);
        check_largest(best, type);
    }
    for (const Floats& floats : kFloats) {
        expect(!find(floats.type, 16, 40) && find(floats.type, 1, 16), "columns are a multiple of 16, rows of nothing");
        for (int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 33})
            check_floats(best, floats, 1 + random_bits() % 40, 16 * (1 + random_bits() % 70), n, false);
        check_floats(best, floats, 300, 1024, 7, false);
        check_floats(best, floats, 17, 512, 6, true);
    }
    printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
