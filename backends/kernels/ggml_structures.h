// What the glue sees of ggml: the structures and functions it needs, in our own words, as they lie in memory
// in the version that llama-cpp-python is pinned to. ggml_functions.cpp verifies them before they are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace edgespec::ggml {

constexpr const char* kVersion = "0.25.3";
constexpr const char* kCommit = "0c1e570";  // of llama.cpp, as it says it where it was built with git

// Values of ggml's enumerations.
enum Type : int {
    GGML_TYPE_F32 = 0,
    GGML_TYPE_F16 = 1,
    GGML_TYPE_Q4_0 = 2,
    GGML_TYPE_Q8_0 = 8,
    GGML_TYPE_I32 = 26,
    GGML_TYPE_I64 = 27,
    GGML_TYPE_BF16 = 30,
};
enum Operation : int {
    GGML_OP_NONE = 0,
    GGML_OP_MUL_MAT = 29,
    GGML_OP_MUL_MAT_ID = 30,
    GGML_OP_GET_ROWS = 40,
    GGML_OP_SET_ROWS = 42,
    GGML_OP_FILL = 73,
    GGML_OP_FLASH_ATTN_EXT = 74,
};
constexpr int kSuccess = 0;

struct Buffer;
struct BufferType;
struct Device;
struct Registry;
struct Threadpool;

struct Tensor {
    int type;
    Buffer* buffer;
    int64_t ne[4];  // sizes, the contiguous one first
    size_t nb[4];   // strides in bytes
    int op;
    int32_t op_params[16];
    int32_t flags;
    Tensor* src[10];
    Tensor* view_src;
    size_t view_offs;
    void* data;
    char name[64];
    void* extra;
    char padding[8];
};

struct BufferFunctions {
    void (*free_buffer)(Buffer*);
    void* (*get_base)(Buffer*);
    int (*init_tensor)(Buffer*, Tensor*);
    void (*memset_tensor)(Buffer*, Tensor*, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(Buffer*, Tensor*, const void* data, size_t offset, size_t size);
    void (*get_tensor)(Buffer*, const Tensor*, void* data, size_t offset, size_t size);
    void (*set_tensor_2d)(Buffer*, Tensor*, const void*, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(Buffer*, const Tensor*, void*, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(Buffer*, const Tensor*, Tensor*);
    void (*clear)(Buffer*, uint8_t value);
    void (*reset)(Buffer*);
};

struct Buffer {
    BufferFunctions functions;
    BufferType* type;
    void* context;
    size_t size;
    int usage;
};

struct BufferTypeFunctions {
    const char* (*get_name)(BufferType*);
    Buffer* (*alloc_buffer)(BufferType*, size_t size);
    size_t (*get_alignment)(BufferType*);
    size_t (*get_max_size)(BufferType*);
    size_t (*get_alloc_size)(BufferType*, const Tensor*);
    bool (*is_host)(BufferType*);
};

struct BufferType {
    BufferTypeFunctions functions;
    Device* device;
    void* context;  // an ExtraBufferType
};

// Ends the process with a message: for what only a fault of ours or of llama.cpp's can cause.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// What one thread of a step is told.
struct ComputeParams {
    int ith, nth;
    size_t wsize;
    void* wdata;  // shared by all threads
    Threadpool* threadpool;
    bool use_ref;
};

// The CPU backend asks each of its extra buffer types, before its own kernels, who computes an operation.
// These are its two classes; only the order of their virtual functions counts.
class TensorTraits {
   public:
    virtual ~TensorTraits() = default;
    virtual bool work_size(int threads, const Tensor* op, size_t& size) = 0;
    virtual bool compute_forward(ComputeParams* params, Tensor* op) = 0;
};

class ExtraBufferType {
   public:
    virtual ~ExtraBufferType() = default;
    virtual bool supports_op(Device* device, const Tensor* op) = 0;
    virtual TensorTraits* get_tensor_traits(const Tensor* op) = 0;
};

struct InitParams {
    size_t mem_size;
    void* mem_buffer;
    bool no_alloc;
};

// ggml's functions, found in the libraries that llama.cpp computes with.
struct Functions {
    const char* (*version)();
    const char* (*commit)();
    void* (*init)(InitParams);
    void (*free)(void* context);
    Tensor* (*new_tensor_2d)(void* context, int type, int64_t ne0, int64_t ne1);
    const char* (*op_name)(int op);
    size_t (*nbytes)(const Tensor*);
    void (*get_tensor)(const Tensor*, void* data, size_t offset, size_t size);
    size_t (*type_size)(int type);
    int64_t (*block_size)(int type);

    BufferType* (*cpu_buffer_type)();
    Buffer* (*alloc_buffer)(BufferType*, size_t size);
    Buffer* (*buffer_at)(void* address, size_t size);  // of the CPU backend; who has it frees the memory
    void (*free_buffer)(Buffer*);
    bool (*is_host)(BufferType*);
    Registry* (*cpu_registry)();
    Device* (*device)(Registry*, size_t index);
    void* (*proc_address)(Registry*, const char* name);
    std::vector<BufferType*>& (*extra_buffer_types)();

    void (*barrier)(Threadpool*);
    void (*set_chunk)(Threadpool*, int value);
    int (*take_chunk)(Threadpool*, int count);
};

extern Functions functions;

// Finds the functions by a handle of the loader (that of llama.cpp's library) and verifies the structures.
// The reason where something does not fit, else nullptr.
const char* find_functions(void* library);

}  // namespace edgespec::ggml
