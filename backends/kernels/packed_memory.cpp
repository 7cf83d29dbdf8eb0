// Pages by mmap.
#include "packed_memory.h"

#ifndef _WIN32
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <cstdint>

namespace edgespec {

#ifdef _WIN32

bool has_pages() { return false; }
void* reserve_pages(size_t, int, bool) { return nullptr; }
size_t file_size(int) { return 0; }
bool make_room(int, size_t) { return false; }
void release_pages(void*, size_t) {}
void write_out(void*, size_t, int, size_t) {}
bool renew_pages(void*, size_t) { return false; }

#else

namespace {

constexpr size_t kHuge = 2 << 20;

}  // namespace

bool has_pages() { return true; }

void* reserve_pages(size_t size, int file, bool is_new) {
    const size_t whole = whole_pages(size), room = whole + kHuge;
    const int access = file < 0 || is_new ? PROT_READ | PROT_WRITE : PROT_READ;
    void* reserved = mmap(nullptr, room, file < 0 ? access : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reserved == MAP_FAILED) return nullptr;
    uint8_t* begin = static_cast<uint8_t*>(reserved);
    uint8_t* at = begin + (kHuge - reinterpret_cast<uintptr_t>(begin) % kHuge) % kHuge;
    if (at > begin) munmap(begin, size_t(at - begin));
    if (begin + room > at + whole) munmap(at + whole, size_t(begin + room - (at + whole)));
    if (file < 0) return at;
    if (mmap(at, size, access, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
        munmap(at, whole);
        return nullptr;
    }
#ifdef MADV_HUGEPAGE  // where the file system has them, and the file is only read
    madvise(at, size, MADV_HUGEPAGE);
#endif
    return at;
}

size_t file_size(int file) {
    struct stat told;
    return fstat(file, &told) == 0 ? size_t(told.st_size) : 0;
}

bool make_room(int file, size_t size) {
#ifdef __linux__
    return posix_fallocate(file, 0, off_t(size)) == 0;
#else
    return ftruncate(file, off_t(size)) == 0;
#endif
}

void release_pages(void* at, size_t size) { munmap(at, whole_pages(size)); }

void write_out(void* at, size_t size, [[maybe_unused]] int file, [[maybe_unused]] size_t offset) {
    msync(at, whole_pages(size), MS_SYNC);
    madvise(at, whole_pages(size), MADV_DONTNEED);
#ifdef POSIX_FADV_DONTNEED
    posix_fadvise(file, off_t(offset), off_t(whole_pages(size)), POSIX_FADV_DONTNEED);
#endif
}

bool renew_pages(void* at, size_t size) {
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    return mmap(at, whole_pages(size), PROT_READ | PROT_WRITE, kind, -1, 0) != MAP_FAILED;
}

#endif

}  // namespace edgespec
