// Which type has which product on this processor. Chosen once, at the first question.
#include "products.h"

#include <cstdlib>
#include <cstring>

#include "compiler.h"
#include "tables.h"

namespace edgespec {
namespace {

// Best first. Every set has all types; what a set lacks would be left out of its table.
const InstructionSet* const kSets[] = {
#if defined(__x86_64__)
#if defined(__linux__)
    &kAmx,
#endif
    &kAvx512Vnni, &kAvxVnni,     &kAvx2,
#endif
#if defined(HAVE_I8MM)
    &kNeonI8mm,
#endif
#if defined(HAVE_DOTPROD)
    &kNeonDotprod,
#endif
    &kScalar,
};

const InstructionSet* named(const char* name) {
    for (const InstructionSet* set : kSets)
        if (strcmp(set->name, name) == 0 && set->runs_here()) return set;
    return nullptr;
}

const InstructionSet* best() {
    for (const InstructionSet* set : kSets)
        if (set->runs_here()) return set;
    return &kScalar;
}

const InstructionSet* from_environment() {
    const char* name = std::getenv("EDGESPEC_KERNELS_ISA");
    const InstructionSet* set = name ? named(name) : nullptr;
    return set ? set : best();
}

const InstructionSet*& current() {
    static const InstructionSet* set = from_environment();
    return set;
}

}  // namespace

const Format* find(int ggml_type, int64_t rows, int64_t k) {
    for (const Format& format : current()->formats) {
        if (format.type != ggml_type) continue;
        bool fits = rows > 0 && k > 0 && rows % format.panel_rows == 0 && k % format.block_columns == 0;
        return fits ? &format : nullptr;
    }
    return nullptr;
}

bool choose(const char* instructions) {
    const InstructionSet* set = named(instructions);
    if (set) current() = set;
    return set != nullptr;
}

const char* chosen() { return current()->name; }

const AttentionStages* attention_stages() { return current()->attention; }

// One block more than a column needs: columns of 4,096 would otherwise share the first cache's sets.
static int64_t column_stride(int64_t k) { return k / 32 + 1; }

size_t activation_bytes(int64_t k, int64_t n) { return size_t(column_stride(k) * n) * sizeof(ActivationBlock); }

Activations activations_at(void* memory, int64_t k) {
    return {static_cast<ActivationBlock*>(memory), column_stride(k)};
}

void quantize_blocks(const float* x, int64_t first_block, int64_t end_block, ActivationBlock* to) {
    current()->quantize(x, first_block, end_block, to);
}

void quantize(const float* x, int64_t stride, int64_t first, int64_t end, int64_t k, Activations to) {
    for (int64_t t = first; t < end; t++) quantize_blocks(x + t * stride, 0, k / 32, to.blocks + t * to.stride);
}

}  // namespace edgespec
