// Keys of all tokens of one prompt, by position, in blocks laid out as the attention sweep reads them.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <vector>

namespace laguna {

class KeyStore {
  public:
    static constexpr int64_t BLOCK = 1024; // tokens

    // type: f32, or f16 for half the memory.
    KeyStore(int64_t n_head_kv, int64_t head_dim, ggml_type type);

    int64_t n_tokens() const { return n_tokens_; }
    int64_t n_head_kv() const { return n_head_kv_; }
    int64_t head_dim() const { return head_dim_; }
    ggml_type type() const { return type_; }
    size_t n_blocks() const { return blocks_.size(); }
    size_t n_bytes() const { return blocks_.size() * block_bytes(); }

    void append(const float *keys, int64_t n); // [n, n_head_kv, head_dim]
    void truncate(int64_t n);                  // forgets tokens n...; no effect when there are not as many

    const uint8_t *block(size_t index) const { return blocks_[index].data(); } // [n_head_kv, BLOCK, head_dim]
    size_t block_bytes() const { return static_cast<size_t>(n_head_kv_ * BLOCK) * row_bytes_; }
    void copy(float *keys) const; // [n_tokens, n_head_kv, head_dim]

  private:
    uint8_t *row(int64_t token, int64_t head);

    int64_t n_head_kv_;
    int64_t head_dim_;
    ggml_type type_;
    size_t row_bytes_;
    int64_t n_tokens_ = 0;
    std::vector<std::vector<uint8_t>> blocks_;
};

} // namespace laguna
