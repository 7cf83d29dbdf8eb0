// Finding ggml's functions, and making sure that its structures are those that we declare.
#include "ggml_structures.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifndef _WIN32
#include <dlfcn.h>
#endif

namespace edgespec::ggml {

Functions functions;

namespace {

#ifdef _WIN32
// The functions that register a buffer type are not exported there.
void* find_symbol(void*, const char*) { return nullptr; }
#else
void* find_symbol(void* library, const char* name) { return dlsym(library, name); }
#endif

template <class Function>
bool find_one(void* library, const char* name, Function& to) {
    void* address = find_symbol(library, name);
    memcpy(&to, &address, sizeof to);
    return address != nullptr;
}

bool find_all(void* library, Functions& to) {
    return find_one(library, "ggml_version", to.version) &&
           find_one(library, "ggml_commit", to.commit) && find_one(library, "ggml_init", to.init) &&
           find_one(library, "ggml_free", to.free) &&
           find_one(library, "ggml_new_tensor_2d", to.new_tensor_2d) &&
           find_one(library, "ggml_op_name", to.op_name) &&
           find_one(library, "ggml_nbytes", to.nbytes) &&
           find_one(library, "ggml_backend_tensor_get", to.get_tensor) &&
           find_one(library, "ggml_type_size", to.type_size) &&
           find_one(library, "ggml_blck_size", to.block_size) &&
           find_one(library, "ggml_backend_cpu_buffer_type", to.cpu_buffer_type) &&
           find_one(library, "ggml_backend_buft_alloc_buffer", to.alloc_buffer) &&
           find_one(library, "ggml_backend_cpu_buffer_from_ptr", to.buffer_at) &&
           find_one(library, "ggml_backend_buffer_free", to.free_buffer) &&
           find_one(library, "ggml_backend_buft_is_host", to.is_host) &&
           find_one(library, "ggml_backend_cpu_reg", to.cpu_registry) &&
           find_one(library, "ggml_backend_reg_dev_get", to.device) &&
           find_one(library, "ggml_backend_reg_get_proc_address", to.proc_address) &&
           find_one(library, "_Z39ggml_backend_cpu_get_extra_buffer_typesv", to.extra_buffer_types) &&
           find_one(library, "ggml_barrier", to.barrier) &&
           find_one(library, "ggml_threadpool_chunk_set", to.set_chunk) &&
           find_one(library, "ggml_threadpool_chunk_add", to.take_chunk);
}

// Several commits have one version. Builds without git call theirs "unknown".
bool is_commit(const char* said) {
    return strncmp(said, kCommit, strlen(kCommit)) == 0 || strcmp(said, "unknown") == 0;
}

// A tensor that ggml made has its fields where we declare them.
bool tensor_fits() {
    void* context = functions.init({1 << 16, nullptr, true});
    if (!context) return false;
    const Tensor* made = functions.new_tensor_2d(context, GGML_TYPE_I32, 24, 7);
    bool fits = made->type == GGML_TYPE_I32 && made->ne[0] == 24 && made->ne[1] == 7 && made->ne[3] == 1 &&
                made->nb[0] == 4 && made->nb[1] == 96 && made->nb[2] == 672 && made->op == GGML_OP_NONE &&
                !made->buffer && !made->src[0] && !made->view_src && !made->data && !made->extra;
    functions.free(context);
    return fits;
}

bool operations_fit() {
    return strcmp(functions.op_name(GGML_OP_MUL_MAT), "MUL_MAT") == 0 &&
           strcmp(functions.op_name(GGML_OP_MUL_MAT_ID), "MUL_MAT_ID") == 0 &&
           strcmp(functions.op_name(GGML_OP_GET_ROWS), "GET_ROWS") == 0 &&
           strcmp(functions.op_name(GGML_OP_SET_ROWS), "SET_ROWS") == 0 &&
           strcmp(functions.op_name(GGML_OP_FILL), "FILL") == 0 &&
           strcmp(functions.op_name(GGML_OP_FLASH_ATTN_EXT), "FLASH_ATTN_EXT") == 0;
}

bool buffer_fits() {
    BufferType* type = functions.cpu_buffer_type();
    Buffer* buffer = functions.alloc_buffer(type, 4096);
    if (!buffer) return false;
    bool fits = buffer->type == type && buffer->size == 4096 && buffer->functions.get_base(buffer) == buffer->context &&
                type->functions.is_host(type);
    functions.free_buffer(buffer);
    return fits;
}

}  // namespace

void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    fputs("edgespec's kernels: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    std::abort();
}

const char* find_functions(void* library) {
    Functions found;
    if (!find_all(library, found)) return "llama.cpp's library does not export what they plug into";
    if (strcmp(found.version(), kVersion) != 0 || !is_commit(found.commit())) return "they are made for another llama.cpp, with ggml 0.25.3 of commit 0c1e570";
    functions = found;
    if (!tensor_fits() || !operations_fit() || !buffer_fits()) return "ggml's structures differ from those of its version 0.25.3";
    return nullptr;
}

}  // namespace edgespec::ggml
