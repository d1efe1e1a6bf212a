#include "pflash/block15.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace laguna {

namespace {

// Rows go to the device in padded pieces of two sizes: few graphs serve every length, and a row's result does not
// depend on how many others came with it.
constexpr int64_t LARGE_PIECE = 512;
constexpr int64_t SMALL_PIECE = 32;

int64_t piece_size(int64_t n) { return n > LARGE_PIECE / 4 ? LARGE_PIECE : SMALL_PIECE; }

void set_padded(ggml_tensor *tensor, const float *rows, int64_t n) {
    const size_t used = static_cast<size_t>(n) * tensor->nb[1];
    ggml_backend_tensor_set(tensor, rows, 0, used);
    ggml_backend_tensor_memset(tensor, 0, used, ggml_nbytes(tensor) - used);
}

bool all_finite(const float *values, size_t n) {
    return std::all_of(values, values + n, [](float value) { return std::isfinite(value); });
}

} // namespace

void TokenStore::truncate(int64_t n) {
    keys.truncate(n);
    probe.resize(static_cast<size_t>(keys.n_tokens() * n_probe_outputs));
}

Block15Scorer::Block15Scorer(const Block15Config &config, const Block15Source &source, const ProbeSource *probe,
                             int n_threads, const std::string &device)
    : config_(config), backends_(device_by_name(device), n_threads), context_(new_context(8)),
      sweep_(backends_, config.n_head, config.n_head_kv, config.head_dim, GGML_TYPE_F32), token_graphs_(2),
      query_graphs_(2) {
    ggml_context *ctx = context_.get();
    const int64_t dim = config.head_dim;
    attn_norm_ = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, config.n_embd);
    q_weight_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, config.n_embd, config.n_head * dim);
    k_weight_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, config.n_embd, config.n_head_kv * dim);
    q_norm_ = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, dim);
    k_norm_ = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, dim);
    buffer_ = allocate_tensors(ctx, backends_.main(), "the scorer's weights");
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_set(attn_norm_, source.attn_norm, 0, ggml_nbytes(attn_norm_));
    ggml_backend_tensor_set(q_weight_, source.q_weight, 0, ggml_nbytes(q_weight_));
    ggml_backend_tensor_set(k_weight_, source.k_weight, 0, ggml_nbytes(k_weight_));
    ggml_backend_tensor_set(q_norm_, source.q_norm, 0, ggml_nbytes(q_norm_));
    ggml_backend_tensor_set(k_norm_, source.k_norm, 0, ggml_nbytes(k_norm_));
    if (probe != nullptr) {
        probe_ = std::make_unique<Probe>(*probe, config.n_embd, backends_.main());
    }
}

size_t Block15Scorer::weights_bytes() const {
    return ggml_backend_buffer_get_size(buffer_.get()) + (probe_ ? probe_->n_bytes() : 0);
}

// x [n_embd, m] -> [head_dim, heads, m]: attention norm, product, norm per head.
ggml_tensor *Block15Scorer::project(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, ggml_tensor *norm) const {
    ggml_tensor *xh = ggml_mul(ctx, ggml_rms_norm(ctx, x, config_.norm_eps), attn_norm_);
    ggml_tensor *y = ggml_mul_mat(ctx, weight, xh);
    y = ggml_reshape_3d(ctx, y, config_.head_dim, y->ne[0] / config_.head_dim, y->ne[1]);
    return ggml_mul(ctx, ggml_rms_norm(ctx, y, config_.norm_eps), norm);
}

std::unique_ptr<Block15Scorer::TokenGraph> Block15Scorer::build_token_graph(int64_t n_rows) {
    auto result = std::make_unique<TokenGraph>();
    result->graph = std::make_unique<FixedGraph>(backends_, 64, [&](ggml_context *ctx, ggml_cgraph *gf) {
        result->taps = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, config_.n_embd, n_rows);
        ggml_set_input(result->taps);
        result->keys = project(ctx, result->taps, k_weight_, k_norm_);
        ggml_set_output(result->keys);
        ggml_build_forward_expand(gf, result->keys);
        if (probe_) {
            result->probe = probe_->build(ctx, result->taps);
            ggml_set_output(result->probe);
            ggml_build_forward_expand(gf, result->probe);
        }
    });
    return result;
}

std::unique_ptr<Block15Scorer::QueryGraph> Block15Scorer::build_query_graph(int64_t n_rows) {
    auto result = std::make_unique<QueryGraph>();
    result->graph = std::make_unique<FixedGraph>(backends_, 32, [&](ggml_context *ctx, ggml_cgraph *gf) {
        result->taps = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, config_.n_embd, n_rows);
        ggml_set_input(result->taps);
        result->queries = project(ctx, result->taps, q_weight_, q_norm_);
        ggml_set_output(result->queries);
        ggml_build_forward_expand(gf, result->queries);
    });
    return result;
}

void Block15Scorer::append(const float *taps, int64_t n, TokenStore &store) {
    while (n > 0) {
        const int64_t size = piece_size(n);
        const int64_t used = std::min(n, size);
        TokenGraph &graph = token_graphs_.get(size, [&] { return build_token_graph(size); });
        set_padded(graph.taps, taps, used);
        graph.graph->compute();
        const int64_t key_size = config_.n_head_kv * config_.head_dim;
        staging_.resize(static_cast<size_t>(used * key_size));
        ggml_backend_tensor_get(graph.keys, staging_.data(), 0, staging_.size() * sizeof(float));
        store.keys.append(staging_.data(), used);
        if (graph.probe != nullptr) {
            const size_t first = store.probe.size();
            store.probe.resize(first + static_cast<size_t>(used * store.n_probe_outputs));
            ggml_backend_tensor_get(graph.probe, store.probe.data() + first, 0,
                                    (store.probe.size() - first) * sizeof(float));
        }
        taps += used * config_.n_embd;
        n -= used;
    }
}

void Block15Scorer::queries(const float *taps, int64_t n, float *q) {
    while (n > 0) {
        const int64_t size = piece_size(n);
        const int64_t used = std::min(n, size);
        QueryGraph &graph = query_graphs_.get(size, [&] { return build_query_graph(size); });
        set_padded(graph.taps, taps, used);
        graph.graph->compute();
        const int64_t row = config_.n_head * config_.head_dim;
        ggml_backend_tensor_get(graph.queries, q, 0, static_cast<size_t>(used * row) * sizeof(float));
        taps += used * config_.n_embd;
        q += used * row;
        n -= used;
    }
}

bool Block15Scorer::mass(const TokenStore &store, const std::vector<Window> &windows, double *mass) {
    const int64_t n_tokens = store.n_tokens();
    const size_t row_size = static_cast<size_t>(config_.n_head * config_.head_dim);
    std::fill_n(mass, static_cast<size_t>(n_tokens) * windows.size(), 0.0);
    std::vector<std::vector<float>> q(windows.size());
    std::vector<AttentionSweep::Row> rows;
    std::vector<size_t> window_of; // by row
    for (size_t w = 0; w < windows.size(); ++w) {
        q[w].resize(static_cast<size_t>(windows[w].n_rows) * row_size);
        queries(windows[w].taps, windows[w].n_rows, q[w].data());
        if (!all_finite(q[w].data(), q[w].size())) {
            return false;
        }
        for (int64_t row = 0; row < windows[w].n_rows; ++row) {
            rows.push_back({q[w].data() + static_cast<size_t>(row) * row_size, windows[w].allowed});
            window_of.push_back(w);
        }
    }
    const bool sound =
        sweep_.run(store.keys, rows, [&](size_t row, int64_t begin, int64_t n, const float *probabilities) {
            double *out = mass + static_cast<int64_t>(window_of[row]) * n_tokens + begin;
            for (int64_t i = 0; i < n; ++i) {
                out[i] += static_cast<double>(probabilities[i]);
            }
        });
    if (!sound) {
        return false;
    }
    for (size_t w = 0; w < windows.size(); ++w) {
        const double n_terms = static_cast<double>(windows[w].n_rows * config_.n_head);
        double *out = mass + static_cast<int64_t>(w) * n_tokens;
        for (int64_t i = 0; i < n_tokens; ++i) {
            out[i] /= n_terms;
        }
    }
    return all_finite(store.probe.data(), store.probe.size());
}

} // namespace laguna
