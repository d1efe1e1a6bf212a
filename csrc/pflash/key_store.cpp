#include "pflash/key_store.h"

#include "error.h"

#include <cstring>
#include <new>

namespace laguna {

KeyStore::KeyStore(int64_t n_head_kv, int64_t head_dim, ggml_type type)
    : n_head_kv_(n_head_kv), head_dim_(head_dim), type_(type), row_bytes_(ggml_row_size(type, head_dim)) {}

uint8_t *KeyStore::row(int64_t token, int64_t head) {
    uint8_t *block = blocks_[static_cast<size_t>(token / BLOCK)].data();
    return block + static_cast<size_t>(head * BLOCK + token % BLOCK) * row_bytes_;
}

void KeyStore::append(const float *keys, int64_t n) {
    try {
        while (static_cast<int64_t>(blocks_.size()) * BLOCK < n_tokens_ + n) {
            blocks_.emplace_back(block_bytes()); // zeros: what is not filled yet must be finite for the products
        }
    } catch (const std::bad_alloc &) {
        throw Error(ErrorKind::memory, "no memory for the keys of " + std::to_string(n_tokens_ + n) + " tokens");
    }
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t head = 0; head < n_head_kv_; ++head) {
            const float *source = keys + (i * n_head_kv_ + head) * head_dim_;
            uint8_t *target = row(n_tokens_ + i, head);
            if (type_ == GGML_TYPE_F16) {
                ggml_fp32_to_fp16_row(source, reinterpret_cast<ggml_fp16_t *>(target), head_dim_);
            } else {
                std::memcpy(target, source, row_bytes_);
            }
        }
    }
    n_tokens_ += n;
}

void KeyStore::truncate(int64_t n) {
    if (n >= n_tokens_) {
        return;
    }
    n_tokens_ = n;
    blocks_.resize(static_cast<size_t>((n + BLOCK - 1) / BLOCK));
}

void KeyStore::copy(float *keys) const {
    auto &self = const_cast<KeyStore &>(*this);
    for (int64_t token = 0; token < n_tokens_; ++token) {
        for (int64_t head = 0; head < n_head_kv_; ++head) {
            const uint8_t *source = self.row(token, head);
            float *target = keys + (token * n_head_kv_ + head) * head_dim_;
            if (type_ == GGML_TYPE_F16) {
                ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t *>(source), target, head_dim_);
            } else {
                std::memcpy(target, source, row_bytes_);
            }
        }
    }
}

} // namespace laguna
