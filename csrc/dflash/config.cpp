#include "dflash/config.h"

#include "error.h"

#include <cmath>
#include <string>

namespace laguna {

namespace {

void require_range(const char *field, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
        throw Error(ErrorKind::config, std::string(field) + " is " + std::to_string(value) + "; needed " +
                                           std::to_string(low) + ".." + std::to_string(high));
    }
}

} // namespace

void DrafterConfig::validate() const {
    constexpr int64_t wide = int64_t{1} << 24;
    require_range("hidden_size", n_embd, 1, wide);
    require_range("intermediate_size", n_ff, 1, wide);
    require_range("num_hidden_layers", n_layer, 1, 1024);
    require_range("num_key_value_heads", n_head_kv, 1, 1 << 16);
    require_range("num_attention_heads", n_head, n_head_kv, 1 << 16);
    require_range("head_dim", head_dim, 2, 1024);
    require_range("vocab_size", n_vocab, 1, wide);
    require_range("sliding_window", window, 2, int64_t{1} << 20);
    require_range("block_size", block_size, 2, 4096);
    require_range("mask_token_id", mask_token_id, 0, n_vocab - 1);
    require_range("target_layer_ids (count)", n_captured(), 1, 1024);
    if (n_head % n_head_kv != 0) {
        throw Error(ErrorKind::config, "num_attention_heads is " + std::to_string(n_head) +
                                           "; needed a multiple of num_key_value_heads (" + std::to_string(n_head_kv) +
                                           ")");
    }
    if (head_dim % 2 != 0) {
        throw Error(ErrorKind::config, "head_dim is " + std::to_string(head_dim) + "; RoPE needs an even number");
    }
    if (!(norm_eps > 0.0f) || !std::isfinite(norm_eps)) {
        throw Error(ErrorKind::config, "rms_norm_eps must be finite and > 0");
    }
    if (!(rope_theta > 0.0f) || !std::isfinite(rope_theta)) {
        throw Error(ErrorKind::config, "rope_theta must be finite and > 0");
    }
}

} // namespace laguna
