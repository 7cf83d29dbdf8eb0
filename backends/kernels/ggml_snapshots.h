// CPY of ggml where a recurrent layer writes the past of its convolution into snapshots that the step has no
// states for. Nobody reads them: llama.cpp goes back within the last step alone.
#pragma once

#include "ggml_structures.h"

namespace edgespec {

// Whether this operation writes such a snapshot, in a model whose weights are `packed`, which uses the kernels.
bool is_useless_snapshot(const ggml::Tensor* op, const ggml::BufferType* packed);

// An operation that is left out.
class LeftOutTraits : public ggml::TensorTraits {
   public:
    bool work_size(int threads, const ggml::Tensor* op, size_t& size) override;
    bool compute_forward(ggml::ComputeParams* params, ggml::Tensor* op) override;
};

}  // namespace edgespec
