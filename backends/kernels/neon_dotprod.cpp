// Products by NEON with the dot products of Armv8.2 ("dotprod").
#include "compiler.h"

#if defined(HAVE_DOTPROD)
#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "tables.h"

// Compilers name it differently.
#if defined(__clang__)
BEGIN_TARGET("dotprod")
#else
BEGIN_TARGET("arch=armv8.2-a+dotprod")
#endif

namespace edgespec {
namespace {

#include "blocks.h"

#include "neon.h"

#include "tile.h"

template <class F>
struct Multiply {
    static void run(const uint8_t* panels, int64_t first, int64_t end, int64_t k, Activations x, int64_t n,
                    float* out, int64_t out_stride) {
        multiply<F, Neon<0>, Neon<1>>(panels, first, end, k, x, n, out, out_stride);
    }
};

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

const InstructionSet kNeonDotprod = table<Multiply>("neon_dotprod", has_dotprod, quantize_neon, nullptr);

}  // namespace edgespec
#endif
