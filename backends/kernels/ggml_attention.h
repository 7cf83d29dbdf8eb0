// FLASH_ATTN_EXT of ggml: which we compute, and how a step's threads share it.
#pragma once

#include "ggml_structures.h"

namespace edgespec {

// Whether we compute this operation. `packed` is our buffer type: attention whose queries come from weights
// that are packed belongs to a model that uses the kernels.
bool attends(const ggml::Tensor* op, const ggml::BufferType* packed);

class AttentionTraits : public ggml::TensorTraits {
   public:
    bool work_size(int threads, const ggml::Tensor* op, size_t& size) override;
    bool compute_forward(ggml::ComputeParams* params, ggml::Tensor* op) override;
};

// Sizes of one operation that its work memory depends on.
struct AttentionSizes {
    int64_t tokens, heads, kv_heads, dv, cells;
};

// Bytes of work memory for a step on `threads` threads.
size_t attention_work_bytes(const AttentionSizes& sizes, int threads);

}  // namespace edgespec
