// FILL and SET_ROWS of ggml where rows have one value: how the logits of a head's few tokens are spread over the
// model's vocabulary.
#pragma once

#include "ggml_structures.h"

namespace edgespec {

// Whether this operation is one of them. Results are those of ggml, whoever asks.
bool spreads(const ggml::Tensor* op);

class SpreadingTraits : public ggml::TensorTraits {
   public:
    bool work_size(int threads, const ggml::Tensor* op, size_t& size) override;
    bool compute_forward(ggml::ComputeParams* params, ggml::Tensor* op) override;
};

}  // namespace edgespec
