// Attention probabilities of a few query rows over very many keys, block by block: nothing of size rows x keys exists.
#pragma once

#include "ggml/backend.h"
#include "ggml/graph_cache.h"
#include "pflash/key_store.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace laguna {

struct KeyRange {
    int64_t begin, end;
};

class AttentionSweep {
  public:
    AttentionSweep(Backends &backends, int64_t n_head, int64_t n_head_kv, int64_t head_dim, ggml_type key_type);

    struct Row {
        const float *q;                // [n_head, head_dim]
        std::vector<KeyRange> allowed; // ascending, inside the store
    };
    // Probabilities of keys begin..begin+n-1 for one row and head, in ascending order of begin.
    using Visit = std::function<void(size_t row, int64_t begin, int64_t n, const float *probabilities)>;

    // softmax over the allowed keys of q.k / sqrt(head_dim), one row and head after the other within a block. Two
    // passes over the keys: maximum and sum, then the probabilities. Returns false when a value is not finite; then
    // what was visited is of no use.
    bool run(const KeyStore &keys, const std::vector<Row> &rows, const Visit &visit);

    size_t compute_bytes() const { return graphs_.n_bytes(); }

  private:
    // Scores of one block of keys against a tile of query rows.
    struct Graph {
        ggml_tensor *keys = nullptr;   // [head_dim, BLOCK, n_head_kv]
        ggml_tensor *rows = nullptr;   // [head_dim, n_rows * group, n_head_kv]
        ggml_tensor *scores = nullptr; // [BLOCK, n_rows * group, n_head_kv]
        std::unique_ptr<FixedGraph> graph;
    };

    std::unique_ptr<Graph> build(int64_t n_rows);
    const float *compute(Graph &graph, const KeyStore &keys, size_t block, const std::vector<float> &packed);
    bool run_tile(const KeyStore &keys, const Row *rows, size_t n_rows, size_t first_row, const Visit &visit);

    Backends &backends_;
    int64_t n_head_, n_head_kv_, head_dim_;
    ggml_type key_type_;
    GraphCache<int64_t, Graph> graphs_; // by padded number of rows
    std::vector<float> host_scores_;    // only where the scores are in device memory
};

} // namespace laguna
