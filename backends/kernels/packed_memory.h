// Memory of packed weights: pages of its own, which are the system's or those of a file that has them packed already.
#pragma once

#include <cstddef>

namespace edgespec {

// Where matrices begin, and experts in them: whole pages, which can be read and given up alone.
constexpr size_t kPage = 4096;
constexpr size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Whether memory can be pages at all here; the functions below are for where it can.
bool has_pages();

// So many bytes at a multiple of what huge pages want: of the file from its beginning on, to be read only, or fresh ones
// where `file` is negative. nullptr where there are none.
void* reserve_pages(size_t size, int file);

size_t file_size(int file);

void release_pages(void* at, size_t size);

// Puts pages of the file in the place of others that have the same bytes. Others may be reading them.
bool replace_pages(void* at, size_t size, int file);

}  // namespace edgespec
