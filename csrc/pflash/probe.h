// The segment probe: a small network on the raw tap that says where a new unit of text starts.
#pragma once

#include "ggml/backend.h"

#include <vector>

namespace laguna {

// Host pointers; matrices [n_out, n_in] with n_in contiguous.
struct ProbeSource {
    int64_t n_hidden;
    float norm_eps;
    bool gelu_erf;            // false: tanh form
    const float *norm_weight; // [n_embd]
    const float *norm_bias;
    const float *fc1_weight; // [n_hidden, n_embd]
    const float *fc1_bias;   // [n_hidden]
    int64_t n_outputs;       // 1, or 2 with the sub-unit head
    const float *fc2_weight; // [n_outputs, n_hidden]
    const float *fc2_bias;   // [n_outputs]
};

class Probe {
  public:
    Probe(const ProbeSource &source, int64_t n_embd, ggml_backend_t backend);

    int64_t n_outputs() const { return n_outputs_; }
    size_t n_bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

    // LayerNorm -> GELU(fc1) -> fc2: raw values before the convolution. x [n_embd, m] -> [n_outputs, m]
    ggml_tensor *build(ggml_context *ctx, ggml_tensor *x) const;

  private:
    int64_t n_outputs_;
    float norm_eps_;
    bool gelu_erf_;
    ContextPtr context_;
    BufferPtr buffer_;
    ggml_tensor *norm_weight_, *norm_bias_, *fc1_weight_, *fc1_bias_, *fc2_weight_, *fc2_bias_;
};

} // namespace laguna
