// llama.cpp's eval callback: copies the keys of all tokens, and the queries of a window, of the wanted attention
// layers.
#pragma once

#include "pflash/key_store.h"

#include <ggml.h>

#include <cstdint>
#include <string>
#include <vector>

namespace laguna {

struct AttentionShape {
    int64_t n_head, n_head_kv, head_dim;
};

class AttentionCapture {
  public:
    // layers: 0-based, strictly increasing. rotated: after RoPE, as the model attends; false: before it.
    AttentionCapture(std::vector<int> layers, const AttentionShape &shape, bool rotated);
    AttentionCapture(const AttentionCapture &) = delete;
    AttentionCapture &operator=(const AttentionCapture &) = delete;

    // ggml_backend_sched_eval_callback; user_data is the AttentionCapture. Ends the graph behind the last layer's keys
    // and queries.
    static bool callback(ggml_tensor *tensor, bool ask, void *user_data) noexcept;

    void begin(int64_t query_begin, int64_t query_end); // forget everything; this window's queries are wanted
    void next_batch();                                  // before every micro-batch
    int64_t n_tokens() const;                           // throws CaptureError when layers disagree or queries lack

    const AttentionShape &shape() const { return shape_; }
    size_t n_layers() const { return layers_.size(); }
    int64_t query_begin() const { return query_begin_; }
    int64_t query_end() const { return query_end_; }
    const KeyStore &keys(size_t layer) const { return keys_[layer]; }
    const float *query(size_t layer, int64_t row) const; // [n_head, head_dim]
    size_t n_bytes() const;

    bool enabled = false;

  private:
    struct Wanted {
        int layer; // index into layers_, or -1
        bool is_key;
    };
    Wanted find(const ggml_tensor *tensor) const;
    void copy(const ggml_tensor *tensor, Wanted wanted);

    std::vector<int> layers_;
    AttentionShape shape_;
    bool rotated_;
    int64_t query_begin_ = 0, query_end_ = 0;
    int64_t batch_begin_ = 0; // position of the micro-batch's first token
    int n_seen_last_ = 0;     // of the last layer's two tensors, in this micro-batch
    std::vector<KeyStore> keys_;
    std::vector<std::vector<float>> queries_; // by layer, [query_end - query_begin, n_head, head_dim]
    std::vector<int64_t> n_query_rows_;
    std::vector<float> staging_;
    std::string failure_;
};

} // namespace laguna
