// Shape of a Laguna DFlash drafter, as the native half needs it. Python's DrafterConfig holds the full rules.
#pragma once

#include <cstdint>
#include <vector>

namespace laguna {

struct DrafterConfig {
    int64_t n_embd = 0;     // hidden_size, H
    int64_t n_ff = 0;       // intermediate_size, I
    int64_t n_layer = 0;    // L
    int64_t n_head = 0;     // nq
    int64_t n_head_kv = 0;  // nkv
    int64_t head_dim = 0;   // D
    int64_t n_vocab = 0;    // V
    int64_t window = 0;     // W: a query at p sees keys above p - W
    int64_t block_size = 0; // B
    int64_t mask_token_id = 0;
    float norm_eps = 0.0f;
    float rope_theta = 0.0f;
    std::vector<int> target_layers; // 0-based outputs, A of them

    int64_t n_captured() const { return static_cast<int64_t>(target_layers.size()); }
    int64_t n_group() const { return n_head / n_head_kv; } // query heads that share a KV head

    // Bounds that keep every product below in range; throws ConfigError naming the field.
    void validate() const;
};

} // namespace laguna
