// Qwen 3.5 writes the past of its convolutions, a few values of each channel, into all snapshots in every step
// (`llama.cpp: src/models/delta-net-base.cpp`, `build_conv_state`): 54 copies for 3 snapshots of 18 layers. A step
// of n tokens has states for the first n of them alone; into the others goes what the step began with.
#include "ggml_snapshots.h"

#include "ggml_products.h"

namespace edgespec {

using ggml::Tensor;

// The batch stands behind the past in one tensor, a row for each channel. A window on it that begins with its first
// column is the past as it was before the step.
bool is_useless_snapshot(const Tensor* op, const ggml::BufferType* packed) {
    const Tensor *window = op->src[0], *place = op->src[1];
    const Tensor *rows = window->view_src, *cache = place->view_src;
    if (!rows || !cache || rows->op != ggml::kConcat || cache->op != ggml::kNone) return false;
    bool is_past = window->view_offs == 0 && window->ne[0] == rows->src[0]->ne[0] && window->ne[1] == rows->ne[1];
    return is_past && rows->ne[0] > window->ne[0] && comes_from(rows->src[1], packed);
}

bool LeftOutTraits::work_size(int, const Tensor*, size_t&) { return true; }

bool LeftOutTraits::compute_forward(ggml::ComputeParams*, Tensor*) { return true; }

}  // namespace edgespec
