#include "dflash/graph.h"

#include <cmath>

namespace laguna {

namespace {

constexpr size_t F32 = sizeof(float);

ggml_tensor *input(ggml_tensor *tensor, const char *name) {
    ggml_set_input(tensor);
    ggml_set_name(tensor, name);
    return tensor;
}

// Operations of one graph under construction; shapes are in ggml's order.
class Builder {
  public:
    Builder(const DrafterConfig &config, ggml_context *ctx) : config_(config), ctx_(ctx) {}

    ggml_tensor *rms(ggml_tensor *x, ggml_tensor *weight) {
        return ggml_mul(ctx_, ggml_rms_norm(ctx_, x, config_.norm_eps), weight);
    }

    // Norm per head, then rotate-half RoPE over the whole head, no scaling. x [D, n_head, m]
    ggml_tensor *norm_rope(ggml_tensor *x, ggml_tensor *weight, ggml_tensor *positions) {
        return ggml_rope_ext(ctx_, rms(x, weight), positions, nullptr, static_cast<int>(config_.head_dim),
                             GGML_ROPE_TYPE_NEOX, 0, config_.rope_theta, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
    }

    // Part of the rows of a product [n, m] as heads: [D, n_head, m], beginning at element `first`.
    ggml_tensor *heads(ggml_tensor *x, int64_t n_head, int64_t first) {
        return ggml_view_3d(ctx_, x, config_.head_dim, n_head, x->ne[1], config_.head_dim * F32, x->nb[1], first * F32);
    }

    struct QKV {
        ggml_tensor *q, *k, *v; // [D, nq, m], [D, nkv, m], [D, nkv, m]
    };

    QKV project(const LayerWeights &layer, ggml_tensor *x) {
        const int64_t n_q = config_.n_head * config_.head_dim;
        const int64_t n_kv = config_.n_head_kv * config_.head_dim;
        if (layer.qkv == nullptr) {
            return {heads(ggml_mul_mat(ctx_, layer.q, x), config_.n_head, 0),
                    heads(ggml_mul_mat(ctx_, layer.k, x), config_.n_head_kv, 0),
                    heads(ggml_mul_mat(ctx_, layer.v, x), config_.n_head_kv, 0)};
        }
        ggml_tensor *qkv = ggml_mul_mat(ctx_, layer.qkv, x);
        return {heads(qkv, config_.n_head, 0), heads(qkv, config_.n_head_kv, n_q),
                heads(qkv, config_.n_head_kv, n_q + n_kv)};
    }

    // Attention of m rows over cache slots 0..n_slots-1, softplus gate before the output projection. -> [H, m]
    ggml_tensor *attend(const LayerWeights &layer, ggml_tensor *q, ggml_tensor *keys, ggml_tensor *values,
                        ggml_tensor *mask, ggml_tensor *x) {
        const int64_t n_rows = q->ne[2];
        const int64_t n_slots = mask->ne[0];
        const int64_t dim = config_.head_dim;
        // Rows of the query heads that share a KV head stand together: one product per KV head instead of one per head.
        q = ggml_cont(ctx_, ggml_permute(ctx_, q, 0, 2, 1, 3)); // [D, m, nq]
        q = ggml_reshape_3d(ctx_, q, dim, n_rows * config_.n_group(), config_.n_head_kv);
        ggml_tensor *k = ggml_view_3d(ctx_, keys, dim, n_slots, config_.n_head_kv, keys->nb[1], dim * F32, 0);
        ggml_tensor *v =
            ggml_view_3d(ctx_, values, n_slots, dim, config_.n_head_kv, values->nb[1], values->nb[1] * dim, 0);
        ggml_tensor *scores = ggml_mul_mat(ctx_, k, q); // [n_slots, m * group, nkv]
        scores = ggml_reshape_3d(ctx_, scores, n_slots, n_rows, config_.n_head);
        scores = ggml_soft_max_ext(ctx_, scores, mask, 1.0f / std::sqrt(static_cast<float>(dim)), 0.0f);
        scores = ggml_reshape_3d(ctx_, scores, n_slots, n_rows * config_.n_group(), config_.n_head_kv);
        ggml_tensor *o = ggml_mul_mat(ctx_, v, scores); // [D, m * group, nkv]
        o = ggml_permute(ctx_, ggml_reshape_3d(ctx_, o, dim, n_rows, config_.n_head), 0, 2, 1, 3); // [D, nq, m]
        ggml_tensor *gate = ggml_softplus(ctx_, ggml_mul_mat(ctx_, layer.gate, x));                // [nq, m]
        o = ggml_mul(ctx_, o, ggml_reshape_3d(ctx_, gate, 1, config_.n_head, n_rows));
        return ggml_mul_mat(ctx_, layer.o, ggml_reshape_2d(ctx_, o, dim * config_.n_head, n_rows));
    }

    ggml_tensor *feed_forward(const LayerWeights &layer, ggml_tensor *x) {
        ggml_tensor *hidden =
            layer.ffn_gate_up != nullptr
                ? ggml_swiglu(ctx_, ggml_mul_mat(ctx_, layer.ffn_gate_up, x)) // silu(first half) * second half
                : ggml_swiglu_split(ctx_, ggml_mul_mat(ctx_, layer.ffn_gate, x), ggml_mul_mat(ctx_, layer.ffn_up, x));
        return ggml_mul_mat(ctx_, layer.ffn_down, hidden);
    }

  private:
    const DrafterConfig &config_;
    ggml_context *ctx_;
};

// ggml's argmax may return any id of a tie: rank the ids at the maximum, lowest first, and take the one winner.
ggml_tensor *lowest_argmax(ggml_context *ctx, ggml_tensor *logits) { // [V, n] -> [n] i32
    const int64_t n_vocab = logits->ne[0];
    const int64_t n_rows = logits->ne[1];
    ggml_tensor *any = ggml_reshape_2d(ctx, ggml_argmax(ctx, logits), 1, n_rows);
    ggml_tensor *highest = ggml_get_rows(ctx, ggml_reshape_3d(ctx, logits, 1, n_vocab, n_rows), any); // [1, 1, n]
    highest = ggml_reshape_2d(ctx, highest, 1, n_rows);
    ggml_tensor *below = ggml_step(ctx, ggml_neg(ctx, ggml_sub(ctx, logits, highest))); // 1 below the maximum, 0 at it
    ggml_tensor *at = ggml_scale_bias(ctx, below, -1.0f, 1.0f);
    const float n = static_cast<float>(n_vocab);
    ggml_tensor *rank = ggml_scale_bias(ctx, ggml_arange(ctx, 0.0f, n, 1.0f), -1.0f, n); // V ... 1: exact below 2^24
    return ggml_argmax(ctx, ggml_mul(ctx, at, rank));
}

} // namespace

ContextGraph::ContextGraph(const DrafterConfig &config, const Weights &weights, const ContextCache &cache,
                           Backends &backends, int64_t n_rows) {
    const int64_t n_kv = config.n_head_kv * config.head_dim;
    const size_t max_nodes = 64 + 32 * static_cast<size_t>(config.n_layer);
    graph = std::make_unique<FixedGraph>(backends, max_nodes, [&](ggml_context *ctx, ggml_cgraph *gf) {
        Builder build(config, ctx);
        features =
            input(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, config.n_embd, config.n_captured(), n_rows), "features");
        positions = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_rows), "positions");
        key_slots = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_rows), "key_slots");
        value_cells = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_rows * n_kv), "value_cells");

        ggml_tensor *u = build.rms(features, weights.aux_norm); // each captured layer by itself
        u = ggml_reshape_2d(ctx, u, config.n_embd * config.n_captured(), n_rows);
        ggml_tensor *c = build.rms(ggml_mul_mat(ctx, weights.fc, u), weights.hidden_norm); // [H, m]
        ggml_tensor *c_hat = ggml_rms_norm(ctx, c, config.norm_eps);                       // shared by all layers
        for (size_t i = 0; i < weights.layers.size(); ++i) {
            const LayerWeights &layer = weights.layers[i];
            ggml_tensor *e = ggml_mul(ctx, c_hat, layer.attn_norm);
            ggml_tensor *k = build.heads(ggml_mul_mat(ctx, layer.k, e), config.n_head_kv, 0);
            k = build.norm_rope(k, layer.k_norm, positions);
            ggml_tensor *v = ggml_mul_mat(ctx, layer.v, e); // neither normed nor rotated
            k = ggml_reshape_2d(ctx, k, n_kv, n_rows);
            ggml_build_forward_expand(gf, ggml_set_rows(ctx, cache.keys(i), k, key_slots));
            ggml_tensor *cells = ggml_reshape_2d(ctx, cache.values(i), 1, ggml_nelements(cache.values(i)));
            v = ggml_reshape_2d(ctx, v, 1, n_kv * n_rows);
            ggml_build_forward_expand(gf, ggml_set_rows(ctx, cells, v, value_cells));
        }
    });
}

BlockGraph::BlockGraph(const DrafterConfig &config, const Weights &weights, const ContextCache &cache,
                       ggml_tensor *output, Backends &backends, int64_t n_draft, int64_t n_slots, bool argmax) {
    const int64_t n_rows = n_draft + 1;
    const size_t max_nodes = 64 + 64 * static_cast<size_t>(config.n_layer);
    graph = std::make_unique<FixedGraph>(backends, max_nodes, [&](ggml_context *ctx, ggml_cgraph *gf) {
        Builder build(config, ctx);
        embeddings = input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, config.n_embd, n_rows), "embeddings");
        positions = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_rows), "positions");
        mask = input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_slots, n_rows), "mask");

        ggml_tensor *x = embeddings;
        for (size_t i = 0; i < weights.layers.size(); ++i) {
            const LayerWeights &layer = weights.layers[i];
            ggml_tensor *m = build.rms(x, layer.attn_norm);
            Builder::QKV qkv = build.project(layer, m);
            ggml_tensor *q = build.norm_rope(qkv.q, layer.q_norm, positions);
            ggml_tensor *k = build.norm_rope(qkv.k, layer.k_norm, positions);
            // The block's own rows go to the scratch slots 0..n of the cache, so attention reads one piece of memory.
            ggml_tensor *keys = cache.keys(i);
            ggml_tensor *values = cache.values(i);
            ggml_tensor *k_scratch = ggml_view_3d(ctx, keys, config.head_dim, config.n_head_kv, n_rows,
                                                  config.head_dim * F32, keys->nb[1], 0);
            ggml_tensor *v_scratch = ggml_view_3d(ctx, values, n_rows, config.head_dim, config.n_head_kv, values->nb[1],
                                                  values->nb[1] * config.head_dim, 0);
            ggml_build_forward_expand(gf, ggml_cpy(ctx, k, k_scratch));
            ggml_build_forward_expand(gf, ggml_cpy(ctx, ggml_permute(ctx, qkv.v, 1, 2, 0, 3), v_scratch));
            x = ggml_add(ctx, x, build.attend(layer, q, keys, values, mask, m));
            x = ggml_add(ctx, x, build.feed_forward(layer, build.rms(x, layer.ffn_norm)));
        }
        // Row 0, the anchor, is never sampled: the output head is the largest product, so it sees only rows 1..n.
        ggml_tensor *y = ggml_view_2d(ctx, x, config.n_embd, n_draft, x->nb[1], x->nb[1]);
        logits = ggml_mul_mat(ctx, output, build.rms(y, weights.norm)); // [V, n]
        ggml_set_name(logits, "draft_logits");
        ggml_set_output(logits);
        ggml_build_forward_expand(gf, logits);
        if (argmax) {
            tokens = lowest_argmax(ctx, logits);
            ggml_set_output(tokens);
            ggml_build_forward_expand(gf, tokens);
        }
    });
}

} // namespace laguna
