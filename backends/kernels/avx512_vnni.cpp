// Products by AVX-512 VNNI: 16 rows are one vector.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include "compiler.h"
#include "tables.h"

// GCC 12 warns of its own header's undefined vectors (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
namespace edgespec {
namespace {

#include "avx512.h"

#include "tile.h"

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

static bool runs_here() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && has_f16c();
}

const InstructionSet kAvx512Vnni =
    table<Products<Avx512>::Of>("avx512_vnni", runs_here, quantize_avx2, &kAttentionAvx512, kFloatsAvx512);

}  // namespace edgespec
#endif
