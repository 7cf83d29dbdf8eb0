// Pages by mmap.
#include "packed_memory.h"

#ifndef _WIN32
#include <sys/mman.h>
#include <sys/stat.h>
#endif

#include <cstdint>

namespace edgespec {

#ifdef _WIN32

bool has_pages() { return false; }
void* reserve_pages(size_t, int) { return nullptr; }
size_t file_size(int) { return 0; }
void release_pages(void*, size_t) {}
bool replace_pages(void*, size_t, int) { return false; }

#else

namespace {

constexpr size_t kHuge = 2 << 20;

// Huge ones, where the file system has them and the file is read for this.
void* map_file(void* at, size_t size, int file) {
    void* place = mmap(at, size, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0);
#ifdef MADV_HUGEPAGE
    if (place != MAP_FAILED) madvise(place, size, MADV_HUGEPAGE);
#endif
    return place;
}

}  // namespace

bool has_pages() { return true; }

void* reserve_pages(size_t size, int file) {
    const size_t whole = whole_pages(size), room = whole + kHuge;
    const int access = file < 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
    void* reserved = mmap(nullptr, room, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reserved == MAP_FAILED) return nullptr;
    uint8_t* begin = static_cast<uint8_t*>(reserved);
    uint8_t* at = begin + (kHuge - reinterpret_cast<uintptr_t>(begin) % kHuge) % kHuge;
    if (at > begin) munmap(begin, size_t(at - begin));
    if (begin + room > at + whole) munmap(at + whole, size_t(begin + room - (at + whole)));
    if (file < 0 || map_file(at, size, file) != MAP_FAILED) return at;
    munmap(at, whole);
    return nullptr;
}

size_t file_size(int file) {
    struct stat told;
    return fstat(file, &told) == 0 ? size_t(told.st_size) : 0;
}

void release_pages(void* at, size_t size) { munmap(at, whole_pages(size)); }

bool replace_pages(void* at, size_t size, int file) { return map_file(at, size, file) != MAP_FAILED; }

#endif

}  // namespace edgespec
