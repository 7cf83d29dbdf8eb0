// AVX-VNNI's product of bytes by AVX2: avx_vnni.cpp is compiled with this file in front where no processor has it.
#pragma once

#include <immintrin.h>

#include "../../../backends/kernels/tables.h"

namespace emulated {

__attribute__((target("avx2"))) inline __m256i dpbusd(__m256i sum, __m256i a, __m256i b) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}

}  // namespace emulated

#define _mm256_dpbusd_avx_epi32 emulated::dpbusd
#define has_avx_vnni() true
