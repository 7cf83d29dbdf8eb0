// AMX's tiles in software: amx.cpp is compiled with this file in front where no processor has them.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadd
#undef _tile_zero
#undef _tile_stored
#undef _tile_dpbssd

namespace emulated {

struct Tile {
    int rows;
    uint16_t row_bytes;
    uint8_t data[16][64];
};
inline Tile tiles[8];

inline void configure(const void* at) {
    const uint8_t* bytes = static_cast<const uint8_t*>(at);
    for (int i = 0; i < 8; i++) {
        memcpy(&tiles[i].row_bytes, bytes + 16 + 2 * i, 2);
        tiles[i].rows = bytes[48 + i];
    }
}

inline void clear(int i) { memset(tiles[i].data, 0, sizeof tiles[i].data); }

inline void load(int i, const void* at, long stride) {
    clear(i);
    for (int r = 0; r < tiles[i].rows; r++)
        memcpy(tiles[i].data[r], static_cast<const char*>(at) + r * stride, tiles[i].row_bytes);
}

inline void store(int i, void* at, long stride) {
    for (int r = 0; r < tiles[i].rows; r++)
        memcpy(static_cast<char*>(at) + r * stride, tiles[i].data[r], tiles[i].row_bytes);
}

// sums += products of signed bytes, four at a time.
inline void add_products(int to, int a, int b) {
    Tile& sums = tiles[to];
    for (int row = 0; row < sums.rows; row++) {
        for (int column = 0; column < sums.row_bytes / 4; column++) {
            int32_t sum;
            memcpy(&sum, sums.data[row] + 4 * column, 4);
            for (int k = 0; k < tiles[a].row_bytes; k++)
                sum += int8_t(tiles[a].data[row][k]) * int8_t(tiles[b].data[k / 4][4 * column + k % 4]);
            memcpy(sums.data[row] + 4 * column, &sum, 4);
        }
    }
}

}  // namespace emulated

namespace edgespec {
inline bool is_emulated() { return true; }
}  // namespace edgespec

#define _tile_loadconfig(at) emulated::configure(at)
#define _tile_release() ((void)0)
#define _tile_zero(i) emulated::clear(i)
#define _tile_loadd(i, at, stride) emulated::load(i, at, stride)
#define _tile_stored(i, at, stride) emulated::store(i, at, stride)
#define _tile_dpbssd(to, a, b) emulated::add_products(to, a, b)
#define has_amx() is_emulated()
#define syscall(...) 0  // the system's leave to use them
