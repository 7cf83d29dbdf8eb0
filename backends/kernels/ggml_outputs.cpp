// What blocks of a model give, copied while a step computes: heads read it. llama.cpp hands it out for some
// architectures alone, but names it in nearly all of them, and asks a callback about every value by its name.
#include <cstdlib>
#include <cstring>

#include "ggml_structures.h"

namespace edgespec {
namespace {

constexpr int kMostBlocks = 8;
constexpr char kName[] = "l_out-";  // and the number of the block

// As `_Taken` of block_outputs.py.
struct Taken {
    int32_t count, blocks[kMostBlocks];
    int64_t width, room;          // of a block's rows
    int64_t used[kMostBlocks];    // rows of this step so far; more than there is room for where something is wrong
    float* rows;                  // [count, room, width]
};

void copy(const ggml::Tensor* from, Taken& to, int place) {
    const int64_t first = to.used[place], count = from->ne[1];
    to.used[place] += count;
    if (from->type != ggml::GGML_TYPE_F32 || from->ne[0] != to.width || to.used[place] > to.room)
        to.used[place] = to.room + 1;
    else
        ggml::functions.get_tensor(from, to.rows + (place * to.room + first) * to.width, 0, ggml::functions.nbytes(from));
}

}  // namespace
}  // namespace edgespec

// A ggml_backend_sched_eval_callback: asked whether a value is wanted, and called again once it is there.
extern "C"
#ifdef _WIN32
    __declspec(dllexport)
#else
    __attribute__((visibility("default")))
#endif
bool edgespec_take_output(const edgespec::ggml::Tensor* tensor, bool is_question, void* data) {
    edgespec::Taken& to = *static_cast<edgespec::Taken*>(data);
    const bool is_named = strncmp(tensor->name, edgespec::kName, sizeof edgespec::kName - 1) == 0;
    const int block = is_named ? atoi(tensor->name + sizeof edgespec::kName - 1) : -1;
    for (int place = 0; place < to.count && is_named; place++) {
        if (to.blocks[place] != block) continue;
        if (!is_question) edgespec::copy(tensor, to, place);
        return true;
    }
    return !is_question;  // a step goes on
}
