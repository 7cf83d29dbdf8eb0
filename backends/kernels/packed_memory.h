// Memory of packed weights: pages of its own, which are the system's or those of a file that has them packed already.
#pragma once

#include <cstddef>

namespace edgespec {

// Where matrices begin, and experts in them: whole pages, which can be read and given up alone.
constexpr size_t kPage = 4096;
constexpr size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Whether memory can be pages at all here; the functions below are for where it can.
bool has_pages();

// So many bytes at a multiple of what huge pages want: of the file from its beginning on, to be read only unless it
// `is_new`, or fresh ones where `file` is negative. nullptr where there are none.
void* reserve_pages(size_t size, int file, bool is_new);

size_t file_size(int file);

// Gives a new file this size, and all of it room on its disk; whether that was possible.
bool make_room(int file, size_t size);

void release_pages(void* at, size_t size);

// Writes pages of a new file to the disk, so that the system may drop them, and takes them out of memory.
void write_out(void* at, size_t size, int file, size_t offset);

// Puts fresh pages in the place of others; whether that was possible.
bool renew_pages(void* at, size_t size);

}  // namespace edgespec
