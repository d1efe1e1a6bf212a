// The NoPE scorer: attention of query rows over all keys with the projections of the block after the tap, no RoPE.
//
// Block 15 on the tap after block 14 for Qwen3.5; the same computation serves block 13 of Qwen3-0.6B.
#pragma once

#include "ggml/backend.h"
#include "ggml/graph_cache.h"
#include "pflash/attention.h"
#include "pflash/key_store.h"
#include "pflash/probe.h"

#include <memory>
#include <optional>
#include <vector>

namespace laguna {

struct Block15Config {
    int64_t n_embd, n_head, n_head_kv, head_dim;
    float norm_eps;
};

// Host pointers; matrices [n_out, n_in] with n_in contiguous.
struct Block15Source {
    const float *attn_norm; // [n_embd]
    const float *q_weight;  // [n_head * head_dim, n_embd]: query rows only
    const float *k_weight;  // [n_head_kv * head_dim, n_embd]
    const float *q_norm;    // [head_dim]
    const float *k_norm;    // [head_dim]
};

// What is kept of every token of a prompt: its NoPE keys, and the probe's values before the convolution.
struct TokenStore {
    TokenStore(const Block15Config &config, int64_t n_probe_outputs)
        : keys(config.n_head_kv, config.head_dim, GGML_TYPE_F32), n_probe_outputs(n_probe_outputs) {}

    int64_t n_tokens() const { return keys.n_tokens(); }
    size_t n_bytes() const { return keys.n_bytes() + probe.capacity() * sizeof(float); }
    void truncate(int64_t n);

    KeyStore keys;
    int64_t n_probe_outputs;
    std::vector<float> probe; // [n_tokens, n_probe_outputs]
};

class Block15Scorer {
  public:
    // probe: null without one. device: registry name, empty for the CPU.
    Block15Scorer(const Block15Config &config, const Block15Source &source, const ProbeSource *probe, int n_threads,
                  const std::string &device);

    const Block15Config &config() const { return config_; }
    TokenStore new_store() const { return {config_, probe_ ? probe_->n_outputs() : 0}; }

    void append(const float *taps, int64_t n, TokenStore &store); // taps [n, n_embd]

    struct Window {
        const float *taps; // [n_rows, n_embd]
        int64_t n_rows;
        std::vector<KeyRange> allowed;
    };
    // mass [n_windows, n_tokens]: mean over heads and rows of the attention, 0 for keys that are not allowed. False
    // when a value is not finite.
    bool mass(const TokenStore &store, const std::vector<Window> &windows, double *mass);

    size_t weights_bytes() const;
    size_t compute_bytes() const { return token_graphs_.n_bytes() + query_graphs_.n_bytes() + sweep_.compute_bytes(); }

  private:
    struct TokenGraph {
        ggml_tensor *taps = nullptr;  // [n_embd, m]
        ggml_tensor *keys = nullptr;  // [head_dim, n_head_kv, m]
        ggml_tensor *probe = nullptr; // [n_outputs, m], null without a probe
        std::unique_ptr<FixedGraph> graph;
    };
    struct QueryGraph {
        ggml_tensor *taps = nullptr;    // [n_embd, m]
        ggml_tensor *queries = nullptr; // [head_dim, n_head, m]
        std::unique_ptr<FixedGraph> graph;
    };

    ggml_tensor *project(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, ggml_tensor *norm) const;
    std::unique_ptr<TokenGraph> build_token_graph(int64_t n_rows);
    std::unique_ptr<QueryGraph> build_query_graph(int64_t n_rows);
    void queries(const float *taps, int64_t n, float *q);

    Block15Config config_;
    Backends backends_;
    ContextPtr context_;
    BufferPtr buffer_;
    ggml_tensor *attn_norm_, *q_weight_, *k_weight_, *q_norm_, *k_norm_;
    std::unique_ptr<Probe> probe_;
    AttentionSweep sweep_;
    GraphCache<int64_t, TokenGraph> token_graphs_; // by n_rows
    GraphCache<int64_t, QueryGraph> query_graphs_; // by n_rows
    std::vector<float> staging_;
};

} // namespace laguna
