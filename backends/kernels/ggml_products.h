// Operations of ggml on packed weights: which we compute, and how a step's threads share them.
#pragma once

#include "ggml_structures.h"
#include "products.h"

namespace edgespec {

// The product for a tensor of weights, or nullptr for one that stays with llama.cpp.
const Format* format_of(const ggml::Tensor* weights);

// Bytes from the panels of one expert to those of the next, or of a matrix that is alone.
size_t matrix_bytes(const Format& format, const ggml::Tensor* weights);

// Bytes of all panels of a tensor, or of one that stays as it is.
size_t packed_bytes(const ggml::Tensor* weights);

// A product of experts: `columns` of k activations for each of the `tokens`, which go to `slots` experts each.
struct ExpertSizes {
    int64_t k, experts, slots, columns, tokens;
};

// Bytes of work memory for it.
size_t expert_work_bytes(const ExpertSizes& sizes, int threads);

// Whether a value was computed from a product with weights in this buffer type: its model uses the kernels.
bool comes_from(const ggml::Tensor* x, const ggml::BufferType* packed);

// Whether we compute this operation; its first source lies in our buffer, or is to.
bool computes(const ggml::Tensor* op);

class PackedTraits : public ggml::TensorTraits {
   public:
    bool work_size(int threads, const ggml::Tensor* op, size_t& size) override;
    bool compute_forward(ggml::ComputeParams* params, ggml::Tensor* op) override;
};

}  // namespace edgespec
