// Products by NEON with the dot products of Armv8.2 ("dotprod").
#include "compiler.h"

#if defined(HAVE_DOTPROD)
#include <arm_neon.h>

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

}  // namespace
}  // namespace edgespec
END_TARGET

namespace edgespec {

const InstructionSet kNeonDotprod =
    table<Products<Neon<0>, Neon<1>>::Of>("neon_dotprod", has_dotprod, quantize_neon, &kAttentionNeon, kFloatsNeon);

}  // namespace edgespec
#endif
