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

// Bytes of work memory for a step over `tokens`.
size_t attention_work_bytes(int64_t tokens, int64_t heads, int64_t cells);

}  // namespace edgespec
