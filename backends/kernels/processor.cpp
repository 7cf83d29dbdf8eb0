// What this processor can do, where compilers' __builtin_cpu_supports does not know it, or not all of them do.
#include "tables.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace edgespec {
namespace {

struct Features {
    unsigned a = 0, b = 0, c = 0, d = 0;

    Features(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};

bool all_of(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

}  // namespace

bool has_f16c() { return all_of(Features(1, 0).c, 1u << 29); }
bool has_avx_vnni() { return all_of(Features(7, 1).a, 1u << 4); }
bool has_amx() { return all_of(Features(7, 0).d, 3u << 24); }  // tiles and int8

}  // namespace edgespec

#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>

namespace edgespec {

bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }

}  // namespace edgespec
#elif defined(__APPLE__)
#include <sys/sysctl.h>

namespace edgespec {

static bool has(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}

bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has("hw.optional.arm.FEAT_I8MM"); }

}  // namespace edgespec
#endif
#endif
