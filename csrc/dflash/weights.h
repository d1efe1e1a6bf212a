// The drafter's own tensors on one device.
#pragma once

#include "dflash/config.h"
#include "ggml/backend.h"

#include <map>
#include <string>
#include <vector>

namespace laguna {

// A tensor as a checkpoint gives it: raw bytes in ggml's layout, not owned.
struct TensorSource {
    ggml_type type;
    std::vector<int64_t> ne; // ne[0] is the contiguous axis
    const uint8_t *data;
    size_t n_bytes;
};
using TensorSources = std::map<std::string, TensorSource>; // by dialect-A name without ".weight"

struct LayerWeights {
    ggml_tensor *attn_norm;   // [H]
    ggml_tensor *qkv;         // [H, (nq + 2 nkv) D], rows q | k | v; null when their types differ
    ggml_tensor *q, *k, *v;   // row views of qkv, or tensors of their own
    ggml_tensor *q_norm;      // [D]
    ggml_tensor *k_norm;      // [D]
    ggml_tensor *gate;        // [H, nq]
    ggml_tensor *o;           // [nq D, H]
    ggml_tensor *ffn_norm;    // [H]
    ggml_tensor *ffn_gate_up; // [H, 2 I], rows gate | up; null when their types differ
    ggml_tensor *ffn_gate, *ffn_up;
    ggml_tensor *ffn_down; // [I, H]
};

class Weights {
  public:
    // Checks names and shapes against the config (CheckpointError), then copies the bytes to the device.
    Weights(const DrafterConfig &config, const TensorSources &sources, ggml_backend_t backend);

    ggml_tensor *fc;          // [A H, H]
    ggml_tensor *aux_norm;    // [H, A]
    ggml_tensor *hidden_norm; // [H]
    ggml_tensor *norm;        // [H]
    std::vector<LayerWeights> layers;

    size_t n_bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

  private:
    ContextPtr context_;
    BufferPtr buffer_;
};

} // namespace laguna
