// The plug-in: a buffer type of packed weights that ggml's CPU backend takes for one of its own.
//
// llama.cpp asks for each weight, in the order of the CPU backend's extra buffer types, whether its operation
// is supported there. What we take is packed as it is read and multiplied inside the CPU backend's own step, by
// its own threads: the graph is not cut, and nothing is copied.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <malloc.h>
#elif defined(__APPLE__)
#include <malloc/malloc.h>
#endif

#include "attention.h"
#include "expert_cache.h"
#include "ggml_attention.h"
#include "ggml_products.h"
#include "ggml_spreading.h"
#include "packed_memory.h"

#ifdef _WIN32
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

namespace edgespec {

// Memory of packed weights.
struct Loaded {
    void* begin;
    size_t size;
    uint64_t layout;  // tells apart what lies in it, and where
    int is_mapped;
};

namespace {

using ggml::Buffer;
using ggml::BufferType;
using ggml::functions;
using ggml::Tensor;

constexpr int64_t kRowsAThread = 256;  // at least: less is not worth a thread

BufferType* packed_type();

// Loads of this thread pack what they can. Questions are decided by it: weights that are packed stay so.
thread_local bool is_enabled = false;
thread_local bool packs_table = false;  // the embedding table, which is the head, too
thread_local int loading_threads = 1;

// The file that this thread loads packed weights from, or into if it `is_new`, or -1. Of those that it loaded last the
// memory and the experts.
thread_local int packed_file = -1;
thread_local bool is_new = false;
thread_local bool writes_out = false;  // what was packed, as memory has no room for all
thread_local Loaded loaded = {};
thread_local std::vector<ExpertTensor> experts;
thread_local std::vector<std::string> layers_of_experts;
// Weights that are there. llama.cpp reads none whose name it does not find in its file, so it does not see theirs.
thread_local std::vector<Tensor*> nameless;

void hide_or_show_name(Tensor* tensor) { std::swap(tensor->name[0], tensor->name[sizeof tensor->name - 1]); }

std::atomic<bool> has_heads = false;  // with a vocabulary of their own, in this process

class PackedBufferType : public ggml::ExtraBufferType {
   public:
    bool supports_op(ggml::Device*, const Tensor* op) override {
        const Buffer* buffer = op->src[0] ? op->src[0]->buffer : nullptr;
        if (!buffer || buffer->type != packed_type()) return false;
        bool is_question = buffer->size == 0;  // about a weight that lies nowhere yet
        bool is_wanted = is_enabled && (packs_table || op->op != ggml::GGML_OP_GET_ROWS);
        return (is_wanted || !is_question) && computes(op);
    }

    ggml::TensorTraits* get_tensor_traits(const Tensor* op) override {
        if (op->op == ggml::GGML_OP_FLASH_ATTN_EXT) return attends(op, packed_type()) ? &attention_ : nullptr;
        if (op->op == ggml::GGML_OP_FILL || op->op == ggml::GGML_OP_SET_ROWS) return has_heads && spreads(op) ? &spreading_ : nullptr;
        if (op->op != ggml::GGML_OP_MUL_MAT && op->op != ggml::GGML_OP_MUL_MAT_ID && op->op != ggml::GGML_OP_GET_ROWS) return nullptr;
        const Buffer* buffer = op->src[0]->buffer;
        return buffer && buffer->type == packed_type() ? &traits_ : nullptr;
    }

   private:
    PackedTraits traits_;
    AttentionTraits attention_;
    SpreadingTraits spreading_;
};

// FNV-1a.
void note(const void* bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        loaded.layout = (loaded.layout ^ static_cast<const uint8_t*>(bytes)[i]) * 0x100000001b3;
}

int init_tensor(Buffer* buffer, Tensor* tensor) {
    tensor->extra = const_cast<Format*>(format_of(tensor));
    if (buffer->context != loaded.begin) return ggml::kSuccess;
    const int64_t offset = static_cast<uint8_t*>(tensor->data) - static_cast<uint8_t*>(loaded.begin);
    note(tensor->name, strlen(tensor->name));
    note(&tensor->type, sizeof tensor->type);
    note(tensor->ne, sizeof tensor->ne);
    note(&offset, sizeof offset);
    const std::string name = tensor->name;
    if (tensor->extra && name.find("_exps.") != std::string::npos) {  // others with a third dimension have other numbers
        const std::string layer = name.substr(0, name.find('.', name.find('.') + 1));  // "blk.0"
        auto& all = layers_of_experts;
        const auto place = std::find(all.begin(), all.end(), layer);
        const int number = int(place - all.begin());
        if (place == all.end()) all.push_back(layer);
        experts.push_back({static_cast<uint8_t*>(tensor->data), matrix_bytes(*format_of(tensor), tensor), tensor->ne[2], number});
    }
    if (loaded.is_mapped && !is_new) {
        nameless.push_back(tensor);
        hide_or_show_name(tensor);
    }
    return ggml::kSuccess;
}

// Packs the rows of a matrix in equal shares for each thread.
void pack_matrix(const Format& f, const uint8_t* file, int64_t rows, int64_t k, uint8_t* panels) {
    int64_t count = rows / f.panel_rows;
    int64_t threads = std::max<int64_t>(1, std::min<int64_t>(loading_threads, rows / kRowsAThread));
    auto pack_share = [&](int64_t i) {
        int64_t from = count * i / threads, to = count * (i + 1) / threads;
        pack(f, file + from * f.panel_rows * int64_t(f.row_bytes(k)), (to - from) * f.panel_rows, k,
             panels + from * int64_t(f.panel_bytes(k)));
    };
    std::vector<std::thread> others;
    others.reserve(size_t(threads));
    int64_t started = 1;
    try {
        for (; started < threads; started++) others.emplace_back(pack_share, started);
    } catch (const std::system_error&) {  // a limit on threads: this one packs the shares that are left
    }
    pack_share(0);
    for (int64_t i = started; i < threads; i++) pack_share(i);
    for (std::thread& other : others) other.join();
}

// Whole matrices at a time; llama.cpp sets whole tensors. Not what the file has already.
void set_tensor(Buffer* buffer, Tensor* tensor, const void* data, size_t offset, size_t size) {
    const bool is_mapped = buffer->context == loaded.begin && loaded.is_mapped;
    if (is_mapped && !is_new) return;
    const Format& f = *static_cast<const Format*>(tensor->extra);
    const size_t matrix = f.row_bytes(tensor->ne[0]) * size_t(tensor->ne[1]);
    if (offset % matrix != 0 || size % matrix != 0)
        ggml::fail("%zu bytes at %zu of %s are not whole matrices of %zu", size, offset, tensor->name, matrix);
    for (size_t i = 0; i < size / matrix; i++)
        pack_matrix(f, static_cast<const uint8_t*>(data) + i * matrix, tensor->ne[1], tensor->ne[0],
                    static_cast<uint8_t*>(tensor->data) + (offset / matrix + i) * matrix_bytes(f, tensor));
    const size_t place = size_t(static_cast<uint8_t*>(tensor->data) - static_cast<uint8_t*>(loaded.begin));
    if (is_mapped && writes_out) write_out(tensor->data, packed_bytes(tensor), packed_file, place);
}

const char* get_name(BufferType*) { return "CPU_EDGESPEC"; }

void free_buffer(Buffer* buffer) {
    if (buffer->context == loaded.begin) {  // a load that failed
        nameless.clear();
        loaded = {};
    }
    release_experts(buffer->context);
    release_pages(buffer->context, buffer->size);
}

// Memory for the CPU backend, of which nobody else reads the contents. Questions are about none.
Buffer* alloc_buffer(BufferType* type, size_t size) {
    const bool is_ours = size > 0 && has_pages();
    int file = -1;
    if (is_ours && packed_file >= 0 && (is_new ? make_room(packed_file, size) : file_size(packed_file) == size)) file = packed_file;
    void* pages = nullptr;
    if (is_ours && (file >= 0 || !writes_out)) pages = reserve_pages(size, file, is_new);
    if (is_ours && !pages && is_new && !writes_out) pages = reserve_pages(size, file = -1, false);  // what some file systems cannot
    if (is_ours && !pages) {
        if (writes_out) loaded = {nullptr, size, 0, false};  // asked for, and not there
        return nullptr;
    }
    Buffer* buffer = is_ours ? functions.buffer_at(pages, size) : functions.alloc_buffer(functions.cpu_buffer_type(), size);
    if (!buffer) return nullptr;
    if (is_ours) {
        buffer->functions.free_buffer = free_buffer;
        loaded = {pages, size, 0xcbf29ce484222325, file >= 0};
    }
    buffer->type = type;
    buffer->functions.init_tensor = init_tensor;
    buffer->functions.set_tensor = set_tensor;
    buffer->functions.get_tensor = nullptr;
    buffer->functions.cpy_tensor = nullptr;
    return buffer;
}

size_t get_alignment(BufferType*) { return kPage; }

size_t get_alloc_size(BufferType*, const Tensor* tensor) { return packed_bytes(tensor); }

bool is_host(BufferType*) { return false; }

BufferType* packed_type() {
    static PackedBufferType asked;
    static BufferType type = {{get_name, alloc_buffer, get_alignment, nullptr, get_alloc_size, is_host},
                              functions.device(functions.cpu_registry(), 0),
                              static_cast<ggml::ExtraBufferType*>(&asked)};
    return &type;
}

// Two lists of buffer types: one is read by every operation of every model, the other, which ends with a null, when
// a model is loaded. Other threads of the process may be reading them. So neither is ever moved: an entry more goes
// into the room that its allocation happens to have, one pointer at a time.

// Bytes behind an address that was allocated; 0 where nobody tells.
size_t allocated_bytes([[maybe_unused]] void* address) {
#if defined(__linux__)
    return malloc_usable_size(address);
#elif defined(__APPLE__)
    return malloc_size(address);
#else
    return 0;
#endif
}

// Processors read ahead: the pause is far longer than what they have begun when they see the value.
template <class Value>
void publish(Value* place, Value value) {
    __atomic_store_n(place, value, __ATOMIC_SEQ_CST);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// Ours first, because others may take operations on weights that are not theirs. There is room for one more entry.
// Back to front: who reads meanwhile finds each of the others, maybe twice.
void put_first(BufferType** list, size_t count) {
    for (size_t i = count; i > 0; i--) publish(list + i, list[i - 1]);
    publish(list, packed_type());
}

// The list for operations. A reader takes its beginning, which stays, and its end, once each.
bool join_in_place(std::vector<BufferType*>& types) {
    BufferType** first = types.data();
    const size_t count = types.size();
    BufferType** parts[3];  // beginning, end, and end of the room, in libstdc++ and libc++
    static_assert(sizeof parts == sizeof types);
    memcpy(parts, &types, sizeof parts);
    const bool is_known = parts[0] == first && parts[1] == first + count && parts[2] == first + types.capacity();
    if (!count || !is_known || allocated_bytes(first) < (count + 1) * sizeof *first) return false;
    BufferType*** ends = reinterpret_cast<BufferType***>(&types) + 1;
    publish(first + count, first[count - 1]);
    if (ends[0] == ends[1]) publish(ends + 1, first + count + 1);
    publish(ends, first + count + 1);
    put_first(first, count);
    return true;
}

// The list for loads, which the CPU backend copies from the other one when it is first asked.
bool is_offered() {
    using GetExtra = BufferType** (*)(ggml::Device*);
    void* address = functions.proc_address(functions.cpu_registry(), "ggml_backend_dev_get_extra_bufts");
    if (!address) return false;
    GetExtra get_extra;
    memcpy(&get_extra, &address, sizeof get_extra);
    BufferType** list = get_extra(packed_type()->device);
    size_t count = 0;
    for (; list && list[count]; count++)
        if (list[count] == packed_type()) return true;
    if (!list || allocated_bytes(list) < (count + 2) * sizeof *list) return false;
    publish<BufferType*>(list + count + 1, nullptr);
    put_first(list, count);
    return true;
}

const char* attach(void* library, bool is_alone) {
    if (strcmp(chosen(), "scalar") == 0) return "there are none for this processor";
    if (const char* reason = ggml::find_functions(library)) return reason;
    std::vector<BufferType*>& types = functions.extra_buffer_types();
    if (!join_in_place(types)) {
        if (!is_alone) return "llama.cpp may be computing in another thread, and its list of kernels has no room";
        types.insert(types.begin(), packed_type());
    }
    return is_offered() ? nullptr : "a model was loaded before them";
}

}  // namespace
}  // namespace edgespec

// Makes the kernels known to ggml; `library` is the loader's handle of llama.cpp, which nobody else can be using if
// we are `is_alone`. Once per process. Returns why they stay out, or NULL.
EXPORTED const char* edgespec_kernels_attach(void* library, int is_alone) {
    return edgespec::attach(library, is_alone != 0);
}

// Whether models that this thread loads from now on use them; `threads` pack their weights. A table that is the
// model's head, too (`is_tied`), is packed and kept once. `packed_file` has these weights already, or is to get them if
// it `is_new`, piece by piece if it `writes_out`; or it is negative.
EXPORTED void edgespec_kernels_enable(int enabled, int is_tied, int threads, int packed_file, int is_new, int writes_out) {
    edgespec::is_enabled = enabled != 0;
    edgespec::packs_table = is_tied != 0;
    edgespec::loading_threads = threads;
    edgespec::packed_file = packed_file;
    edgespec::is_new = is_new != 0;
    edgespec::writes_out = writes_out != 0;
    if (enabled) {
        edgespec::loaded = {};
        edgespec::experts.clear();
        edgespec::layers_of_experts.clear();
    }
    for (edgespec::Tensor* tensor : edgespec::nameless) edgespec::hide_or_show_name(tensor);
    edgespec::nameless.clear();
}

// Where this thread has put packed weights last, if it has.
EXPORTED edgespec::Loaded edgespec_kernels_loaded() { return edgespec::loaded; }

// Lets what this thread has loaded last hold so many bytes of experts, and read others from its file when they are used.
// As `hold_experts`.
EXPORTED int edgespec_kernels_hold(int file, size_t expert_bytes) {
    return edgespec::hold_experts(edgespec::loaded.begin, edgespec::loaded.size, file, expert_bytes, edgespec::experts);
}

// What was counted of the experts of packed weights that lie here.
EXPORTED edgespec::ExpertCounts edgespec_kernels_expert_counts(const void* begin) { return edgespec::expert_counts(begin); }

// As `count_experts`.
EXPORTED void edgespec_kernels_count_experts(const void* begin) { edgespec::count_experts(begin); }

// A head of fewer tokens than its model's is in use: its logits are spread over the vocabulary by the kernels.
EXPORTED void edgespec_kernels_spread() { edgespec::has_heads = true; }

EXPORTED const char* edgespec_kernels_instructions() { return edgespec::chosen(); }

// Bytes that a matrix takes when it is packed, or 0 for one that stays with llama.cpp.
EXPORTED size_t edgespec_kernels_packed_bytes(int ggml_type, int64_t rows, int64_t k) {
    const edgespec::Format* f = edgespec::find(ggml_type, rows, k);
    return f ? size_t(rows / f->panel_rows) * f->panel_bytes(k) : 0;
}

// Whether there is attention for keys and values of these lengths, in caches of f16.
EXPORTED int edgespec_kernels_attends(int64_t dk, int64_t dv) {
    const edgespec::CacheType f16 = edgespec::CacheType::f16;
    return edgespec::computes_attention(dk, f16, dv, f16, edgespec::kCellBlock);
}

// The buffer type, for who builds graphs of single products: the check before first use, and timing.
EXPORTED void* edgespec_kernels_buffer_type() { return edgespec::packed_type(); }
