// What llama.cpp lays out for a context, to the byte, by buffer type.
//
// It says so through a C++ map, which only C++ can read; its log rounds to hundredths of a MiB.
#include <cstddef>
#include <cstring>
#include <map>

#ifdef _WIN32
#define EXPORTED extern "C" __declspec(dllexport)
#else
#include <dlfcn.h>
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

namespace {

// llama_memory_breakdown_data and its map, as in llama.cpp's src/llama-ext.h.
struct Bytes {
    size_t model, context, compute;
};
using Breakdown = std::map<const void*, Bytes>;

#ifdef _WIN32
void* find_symbol(void*, const char*) { return nullptr; }
#else
void* find_symbol(void* library, const char* name) { return dlsym(library, name); }
#endif

template <class Function>
Function find(void* library, const char* name) {
    void* address = find_symbol(library, name);
    Function found;
    memcpy(&found, &address, sizeof found);
    return found;
}

}  // namespace

// Bytes of one buffer type; `name` is llama.cpp's own.
struct EdgespecBufferBytes {
    const char* name;
    Bytes bytes;
};

// Fills `into` for at most `most` buffer types of a llama_context; how many there are, or -1 where this
// llama.cpp does not tell. `library` is the loader's handle of llama.cpp.
EXPORTED int edgespec_memory_breakdown(void* library, const void* context, EdgespecBufferBytes* into, int most) {
    auto breakdown = find<Breakdown (*)(const void*)>(library, "_Z26llama_get_memory_breakdownPK13llama_context");
    auto name = find<const char* (*)(const void*)>(library, "ggml_backend_buft_name");
    if (!breakdown || !name) return -1;
    int count = 0;
    for (const auto& [type, bytes] : breakdown(context)) {
        if (count < most) into[count] = {name(type), bytes};
        count++;
    }
    return count;
}
