#include "pflash/attention_capture.h"

#include "error.h"

#include <ggml-backend.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace laguna {

AttentionCapture::AttentionCapture(std::vector<int> layers, const AttentionShape &shape, bool rotated)
    : layers_(std::move(layers)), shape_(shape), rotated_(rotated) {
    if (layers_.empty() || layers_.front() < 0 ||
        std::adjacent_find(layers_.begin(), layers_.end(), [](int a, int b) { return a >= b; }) != layers_.end()) {
        throw Error(ErrorKind::config, "capture needs strictly increasing layer numbers >= 0");
    }
    begin(0, 0);
}

void AttentionCapture::begin(int64_t query_begin, int64_t query_end) {
    query_begin_ = query_begin;
    query_end_ = query_end;
    batch_begin_ = 0;
    n_seen_last_ = 0;
    failure_.clear();
    keys_.assign(layers_.size(), KeyStore(shape_.n_head_kv, shape_.head_dim, GGML_TYPE_F16));
    const size_t n = static_cast<size_t>((query_end - query_begin) * shape_.n_head * shape_.head_dim);
    queries_.assign(layers_.size(), std::vector<float>(n));
    n_query_rows_.assign(layers_.size(), 0);
}

void AttentionCapture::next_batch() {
    batch_begin_ = keys_.front().n_tokens();
    n_seen_last_ = 0;
}

AttentionCapture::Wanted AttentionCapture::find(const ggml_tensor *tensor) const {
    // Several tensors of a layer have the name of the rotated one; only that one is the result of a RoPE.
    const bool is_key = tensor->name[0] == 'K';
    const char *prefix = rotated_ ? (is_key ? "Kcur-" : "Qcur-") : (is_key ? "Kcur_normed-" : "Qcur_normed-");
    const size_t length = std::strlen(prefix);
    if (std::strncmp(tensor->name, prefix, length) != 0 || (rotated_ && tensor->op != GGML_OP_ROPE)) {
        return {-1, is_key};
    }
    char *end = nullptr;
    const long layer = std::strtol(tensor->name + length, &end, 10);
    if (end == tensor->name + length || *end != '\0') {
        return {-1, is_key};
    }
    const auto it = std::lower_bound(layers_.begin(), layers_.end(), layer);
    return {it != layers_.end() && *it == layer ? static_cast<int>(it - layers_.begin()) : -1, is_key};
}

bool AttentionCapture::callback(ggml_tensor *tensor, bool ask, void *user_data) noexcept {
    auto &self = *static_cast<AttentionCapture *>(user_data);
    if (!self.enabled) {
        return !ask;
    }
    if (self.n_seen_last_ == 2) { // another device's part of the same graph: its first node, and no more
        return ask;
    }
    const Wanted wanted = self.find(tensor);
    if (ask) {
        return wanted.layer >= 0;
    }
    if (wanted.layer < 0) {
        return true;
    }
    try {
        self.copy(tensor, wanted);
    } catch (const std::exception &error) {
        self.failure_ = error.what(); // nothing may leave through llama.cpp's C frames
    }
    const bool last = static_cast<size_t>(wanted.layer) + 1 == self.layers_.size();
    return !(last && ++self.n_seen_last_ == 2);
}

void AttentionCapture::copy(const ggml_tensor *tensor, Wanted wanted) {
    const int64_t n_head = wanted.is_key ? shape_.n_head_kv : shape_.n_head;
    if (tensor->type != GGML_TYPE_F32 || tensor->ne[0] != shape_.head_dim || tensor->ne[1] != n_head ||
        tensor->ne[3] != 1 || !ggml_is_contiguous(tensor)) {
        failure_ = std::string(tensor->name) + " is " + ggml_type_name(tensor->type) + " [" +
                   std::to_string(tensor->ne[0]) + ", " + std::to_string(tensor->ne[1]) +
                   ", ...]; needed contiguous f32 [" + std::to_string(shape_.head_dim) + ", " + std::to_string(n_head) +
                   ", ...]";
        return;
    }
    const float *source = static_cast<const float *>(tensor->data);
    if (tensor->buffer == nullptr || !ggml_backend_buffer_is_host(tensor->buffer)) {
        staging_.resize(static_cast<size_t>(ggml_nelements(tensor)));
        ggml_backend_tensor_get(tensor, staging_.data(), 0, ggml_nbytes(tensor));
        source = staging_.data();
    }
    const int64_t n_rows = tensor->ne[2];
    const size_t layer = static_cast<size_t>(wanted.layer);
    if (wanted.is_key) {
        keys_[layer].append(source, n_rows);
        return;
    }
    const int64_t row_size = n_head * shape_.head_dim;
    const int64_t first = std::max(query_begin_, batch_begin_);
    const int64_t end = std::min(query_end_, batch_begin_ + n_rows);
    if (first < end) {
        std::copy_n(source + (first - batch_begin_) * row_size, (end - first) * row_size,
                    queries_[layer].begin() + (first - query_begin_) * row_size);
        n_query_rows_[layer] += end - first;
    }
}

int64_t AttentionCapture::n_tokens() const {
    if (!failure_.empty()) {
        throw Error(ErrorKind::capture, "attention capture failed: " + failure_);
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
        if (keys_[i].n_tokens() != keys_[0].n_tokens() || n_query_rows_[i] != query_end_ - query_begin_) {
            throw Error(ErrorKind::capture,
                        "layer " + std::to_string(layers_[i]) + " gave " + std::to_string(keys_[i].n_tokens()) +
                            " keys and " + std::to_string(n_query_rows_[i]) + " query rows; needed " +
                            std::to_string(keys_[0].n_tokens()) + " and " + std::to_string(query_end_ - query_begin_));
        }
    }
    return keys_[0].n_tokens();
}

const float *AttentionCapture::query(size_t layer, int64_t row) const {
    return queries_[layer].data() + row * shape_.n_head * shape_.head_dim;
}

size_t AttentionCapture::n_bytes() const {
    size_t total = 0;
    for (const KeyStore &keys : keys_) {
        total += keys.n_bytes();
    }
    return total;
}

} // namespace laguna
