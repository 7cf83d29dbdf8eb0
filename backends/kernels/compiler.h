// What compilers call differently: functions for one instruction set, and loops that must be unrolled.
#pragma once

#define INLINE inline __attribute__((always_inline))
#define EDGESPEC_PRAGMA(text) _Pragma(#text)

// Between these, functions use instruction sets that the rest of the library does not.
#if defined(__clang__)
#define UNROLL EDGESPEC_PRAGMA(unroll)
#define BEGIN_TARGET(sets) EDGESPEC_PRAGMA(clang attribute push(__attribute__((target(sets))), apply_to = function))
#define END_TARGET EDGESPEC_PRAGMA(clang attribute pop)
#else
#define UNROLL EDGESPEC_PRAGMA(GCC unroll 16)
#define BEGIN_TARGET(sets) EDGESPEC_PRAGMA(GCC push_options) EDGESPEC_PRAGMA(GCC target(sets))
#define END_TARGET EDGESPEC_PRAGMA(GCC pop_options)
#endif

// clang before 16 declares what NEON has beyond its base only where the whole build may use it.
#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))
#define HAVE_DOTPROD
#endif
#if defined(HAVE_DOTPROD) && (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_MATMUL_INT8))
#define HAVE_I8MM
#endif
