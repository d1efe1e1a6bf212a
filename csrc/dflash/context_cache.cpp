#include "dflash/context_cache.h"

#include "error.h"

#include <algorithm>
#include <limits>
#include <string>

namespace laguna {

namespace {

int64_t pad(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

constexpr int64_t SLOT_MULTIPLE = 32;  // keeps matrix products on their fast paths
constexpr int64_t SMALLEST_VIEW = 128; // below this a shorter view of the ring gains nothing

} // namespace

ContextCache::ContextCache(const DrafterConfig &config, ggml_backend_t backend)
    : window_(config.window), n_block_(pad(config.block_size, SLOT_MULTIPLE / 2)),
      n_ring_(pad(config.window - 1 + config.block_size, SLOT_MULTIPLE)),
      context_(new_context(2 * static_cast<size_t>(config.n_layer))) {
    const int64_t n_kv = config.n_head_kv * config.head_dim;
    for (int64_t i = 0; i < config.n_layer; ++i) {
        keys_.push_back(ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, n_kv, n_slots()));
        values_.push_back(ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, n_slots(), n_kv));
    }
    buffer_ = allocate_tensors(context_.get(), backend, "the drafter's context cache");
    ggml_backend_buffer_clear(buffer_.get(), 0); // a masked slot still enters 0 * value: it must be finite
}

int64_t ContextCache::n_rows() const { return position_ - oldest_; }

int64_t ContextCache::n_slots_used() const {
    const int64_t highest = std::min(position_, n_ring_); // ring slots in use before the first wrap
    for (int64_t view = SMALLEST_VIEW; view <= n_ring_ / 2; view *= 2) {
        if (highest <= view) {
            return n_block_ + view;
        }
    }
    return n_slots();
}

void ContextCache::check_start(int64_t start, int64_t next) const {
    if (start < 0 || (start != next && !empty_)) {
        throw Error(ErrorKind::rollback, "rows start at position " + std::to_string(start) + "; needed " +
                                             std::to_string(next) + ", the next one (no holes)");
    }
}

void ContextCache::begin(int64_t start) {
    if (empty_) {
        empty_ = false;
        first_ = position_ = oldest_ = rope_origin_ = start;
    }
}

void ContextCache::skip(int64_t n) {
    position_ += n;
    oldest_ = rope_origin_ = position_;
}

void ContextCache::commit(int64_t n) {
    position_ += n;
    oldest_ = std::max(oldest_, position_ - n_ring_);
}

void ContextCache::rollback(int64_t position) {
    if (position < first_ || position > position_) {
        throw Error(ErrorKind::rollback, "cannot roll back to position " + std::to_string(position) + "; needed " +
                                             std::to_string(first_) + ".." + std::to_string(position_));
    }
    const int64_t left = std::max<int64_t>(position - oldest_, 0);
    const int64_t needed = std::min(position - first_, window_ - 1);
    if (left < needed) {
        throw Error(ErrorKind::rollback, "rolling back to position " + std::to_string(position) + " would leave " +
                                             std::to_string(left) + " context rows; needed " + std::to_string(needed) +
                                             ": feed the rows again after reset()");
    }
    position_ = position;
    oldest_ = std::min(oldest_, position);
    if (oldest_ == position_) {
        rope_origin_ = position_;
    }
}

void ContextCache::reset() {
    empty_ = true;
    first_ = position_ = oldest_ = rope_origin_ = 0;
}

void ContextCache::fill_mask(float *mask, int64_t n_rows, int64_t n_slots, bool anchored) const {
    constexpr float hidden = -std::numeric_limits<float>::infinity();
    std::fill(mask, mask + n_rows * n_slots, hidden);
    for (int64_t row = 0; row < n_rows; ++row) {
        float *out = mask + row * n_slots;
        const int64_t above = position_ + (anchored ? 0 : row) - window_; // keys at p > above are visible
        for (int64_t p = std::max(oldest_, above + 1); p < position_; ++p) {
            out[slot(p)] = 0.0f;
        }
        for (int64_t i = 0; i <= row; ++i) {
            if (position_ + i > above) {
                out[i] = 0.0f;
            }
        }
    }
}

} // namespace laguna
