// A Laguna DFlash drafter: weights, context cache and graphs together.
#pragma once

#include "dflash/config.h"
#include "dflash/context_cache.h"
#include "dflash/graph.h"
#include "dflash/target.h"
#include "dflash/weights.h"
#include "ggml/backend.h"
#include "ggml/graph_cache.h"

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

namespace laguna {

class Drafter {
  public:
    Drafter(DrafterConfig config, const TensorSources &sources, int n_threads, const std::string &device);

    const DrafterConfig &config() const { return config_; }
    int64_t position() const { return cache_.position() + n_deferred(); }
    int64_t first_position() const { return cache_.first_position(); }
    int64_t n_rows() const { return cache_.n_rows() + n_deferred(); } // context rows without a gap before position()
    int n_threads() const { return backends_.n_threads(); }
    void set_n_threads(int n_threads) { backends_.set_n_threads(n_threads); }

    // The model must outlive the binding.
    void bind_target(const llama_model *model);
    void unbind_target();
    bool has_target() const { return target_.has_value(); }

    // Draft only tokens `ids` (ascending): `rows` are theirs of the output head, in its type. Empty: all tokens again.
    void limit_vocabulary(std::vector<int32_t> ids, ggml_type type, const uint8_t *rows, size_t n_bytes);

    // features [n_rows, A, H] of the positions from start_position on.
    void append(const float *features, int64_t n_rows, int64_t start_position);
    // The same, computed later: with the next draft, or when a block of rows is full. While decoding is plain, a row
    // then costs a copy instead of one more pass over the weights.
    void defer(const float *features, int64_t n_rows, int64_t start_position);
    void flush();
    void rollback(int64_t position);
    void reset();

    // Greedy tokens of positions P+1..P+n; logits [n, V] are copied when not null. Changes no state.
    void draft(int32_t anchor, int64_t n, bool anchored, int32_t *tokens, float *logits);

    bool argmax_on_device = false; // always so for logits outside host memory

    size_t weights_bytes() const {
        return weights_.n_bytes() + (limited_buffer_ ? ggml_backend_buffer_get_size(limited_buffer_.get()) : 0);
    }
    size_t cache_bytes() const { return cache_.n_bytes(); }
    size_t compute_bytes() const { return context_graphs_.n_bytes() + block_graphs_.n_bytes(); }

  private:
    int64_t row_size() const { return config_.n_captured() * config_.n_embd; }
    int64_t n_deferred() const { return static_cast<int64_t>(deferred_.size()) / row_size(); }
    void check_rows(int64_t n_rows, int64_t start_position) const;
    void add(const float *features, int64_t n_rows);
    void store(const float *features, int64_t n_rows);
    ggml_tensor *output() const { return limited_output_ != nullptr ? limited_output_ : target_->output(); }

    DrafterConfig config_;
    Backends backends_;
    Weights weights_;
    ContextCache cache_;
    std::optional<TargetTensors> target_;
    std::vector<int32_t> limited_ids_;
    ContextPtr limited_context_;
    BufferPtr limited_buffer_;
    ggml_tensor *limited_output_ = nullptr;                                   // [H, limited_ids_.size()]
    GraphCache<int64_t, ContextGraph> context_graphs_;                        // by n_rows
    GraphCache<std::tuple<int64_t, int64_t, bool>, BlockGraph> block_graphs_; // by n, n_slots, argmax
    std::vector<float> deferred_;                                             // rows that follow those of the cache
    std::vector<float> mask_row_;                                             // embedding of the mask token
    std::vector<float> embeddings_;
    std::vector<float> logits_; // of a limited vocabulary, on their way to the caller
    std::vector<float> mask_;
    std::vector<int32_t> positions_;
    std::vector<int64_t> slots_;
    std::vector<int64_t> cells_;
};

} // namespace laguna
