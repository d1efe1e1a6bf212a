#include "dflash/weights.h"

#include "error.h"

#include <functional>
#include <set>

namespace laguna {

namespace {

std::string shape_text(const std::vector<int64_t> &ne) {
    std::string text = "[";
    for (size_t i = 0; i < ne.size(); ++i) {
        text += (i ? ", " : "") + std::to_string(ne[i]);
    }
    return text + "]";
}

// Creates device tensors for checkpoint tensors and remembers which bytes go where.
class Loader {
  public:
    Loader(ggml_context *context, const TensorSources &sources) : context_(context), sources_(sources) {}

    const TensorSource &source(const std::string &name, const std::vector<int64_t> &ne, bool norm = false) {
        const auto it = sources_.find(name);
        if (it == sources_.end()) {
            throw Error(ErrorKind::checkpoint, "tensor " + name + " is missing; a Laguna DFlash drafter needs it");
        }
        const TensorSource &source = it->second;
        std::vector<int64_t> found = source.ne;
        while (found.size() > ne.size() && found.back() == 1) {
            found.pop_back();
        }
        if (found != ne) {
            throw Error(ErrorKind::checkpoint,
                        "tensor " + name + " has shape " + shape_text(source.ne) + "; needed " + shape_text(ne));
        }
        if (source.type < 0 || source.type >= GGML_TYPE_COUNT || ggml_blck_size(source.type) == 0 ||
            ne[0] % ggml_blck_size(source.type) != 0) {
            throw Error(ErrorKind::checkpoint, "tensor " + name + " has a type that its rows cannot hold (id " +
                                                   std::to_string(static_cast<int>(source.type)) + ")");
        }
        if (norm && source.type != GGML_TYPE_F32) {
            throw Error(ErrorKind::checkpoint,
                        "tensor " + name + " is " + ggml_type_name(source.type) + "; needed f32");
        }
        size_t n_bytes = ggml_row_size(source.type, ne[0]);
        for (size_t i = 1; i < ne.size(); ++i) {
            n_bytes *= static_cast<size_t>(ne[i]);
        }
        if (source.n_bytes != n_bytes) {
            throw Error(ErrorKind::checkpoint, "tensor " + name + " has " + std::to_string(source.n_bytes) +
                                                   " bytes; needed " + std::to_string(n_bytes));
        }
        used_.insert(name);
        return source;
    }

    ggml_tensor *matrix(const std::string &name, int64_t n_in, int64_t n_out) {
        const TensorSource &from = source(name, {n_in, n_out});
        return place(ggml_new_tensor_2d(context_, from.type, n_in, n_out), name, {&from});
    }

    ggml_tensor *norm(const std::string &name, std::vector<int64_t> ne) {
        const TensorSource &from = source(name, ne, /*norm=*/true);
        return place(ggml_new_tensor(context_, from.type, static_cast<int>(ne.size()), ne.data()), name, {&from});
    }

    struct Part {
        std::string name;
        int64_t n_out;
        ggml_tensor **view;
    };

    // Stacks matrices of one type into one, so that a single product computes all; null when the types differ.
    ggml_tensor *fused(const std::string &name, int64_t n_in, const std::vector<Part> &parts) {
        std::vector<const TensorSource *> from;
        bool one_type = true;
        int64_t n_rows = 0;
        for (const Part &part : parts) {
            from.push_back(&source(part.name, {n_in, part.n_out}));
            one_type = one_type && from.back()->type == from.front()->type;
            n_rows += part.n_out;
        }
        if (!one_type) {
            for (const Part &part : parts) {
                *part.view = matrix(part.name, n_in, part.n_out);
            }
            return nullptr;
        }
        ggml_tensor *whole = place(ggml_new_tensor_2d(context_, from.front()->type, n_in, n_rows), name, from);
        int64_t row = 0;
        for (const Part &part : parts) {
            *part.view = ggml_view_2d(context_, whole, n_in, part.n_out, whole->nb[1], row * whole->nb[1]);
            row += part.n_out;
        }
        return whole;
    }

    void upload() const {
        for (const auto &[tensor, from] : pending_) {
            size_t offset = 0;
            for (const TensorSource *source : from) {
                ggml_backend_tensor_set(tensor, source->data, offset, source->n_bytes);
                offset += source->n_bytes;
            }
        }
    }

    void refuse_unknown() const {
        for (const auto &entry : sources_) {
            if (used_.count(entry.first) == 0) {
                throw Error(ErrorKind::checkpoint,
                            "tensor " + entry.first + " is not part of a Laguna DFlash drafter of this configuration");
            }
        }
    }

  private:
    ggml_tensor *place(ggml_tensor *tensor, const std::string &name, std::vector<const TensorSource *> from) {
        ggml_set_name(tensor, name.c_str());
        pending_.emplace_back(tensor, std::move(from));
        return tensor;
    }

    ggml_context *context_;
    const TensorSources &sources_;
    std::set<std::string> used_;
    std::vector<std::pair<ggml_tensor *, std::vector<const TensorSource *>>> pending_;
};

} // namespace

Weights::Weights(const DrafterConfig &config, const TensorSources &sources, ggml_backend_t backend)
    : context_(new_context(8 + 20 * static_cast<size_t>(config.n_layer))) {
    const int64_t n_embd = config.n_embd;
    const int64_t n_q = config.n_head * config.head_dim;
    const int64_t n_kv = config.n_head_kv * config.head_dim;
    Loader loader(context_.get(), sources);
    fc = loader.matrix("fc", config.n_captured() * n_embd, n_embd);
    aux_norm = loader.norm("enc.aux_norm", {n_embd, config.n_captured()});
    hidden_norm = loader.norm("enc.output_norm", {n_embd});
    norm = loader.norm("output_norm", {n_embd});
    for (int64_t i = 0; i < config.n_layer; ++i) {
        const std::string blk = "blk." + std::to_string(i) + ".";
        LayerWeights layer = {};
        layer.attn_norm = loader.norm(blk + "attn_norm", {n_embd});
        layer.qkv = loader.fused(
            blk + "attn_qkv", n_embd,
            {{blk + "attn_q", n_q, &layer.q}, {blk + "attn_k", n_kv, &layer.k}, {blk + "attn_v", n_kv, &layer.v}});
        layer.q_norm = loader.norm(blk + "attn_q_norm", {config.head_dim});
        layer.k_norm = loader.norm(blk + "attn_k_norm", {config.head_dim});
        layer.gate = loader.matrix(blk + "attn_gate", n_embd, config.n_head);
        layer.o = loader.matrix(blk + "attn_output", n_q, n_embd);
        layer.ffn_norm = loader.norm(blk + "ffn_norm", {n_embd});
        layer.ffn_gate_up = loader.fused(
            blk + "ffn_gate_up", n_embd,
            {{blk + "ffn_gate", config.n_ff, &layer.ffn_gate}, {blk + "ffn_up", config.n_ff, &layer.ffn_up}});
        layer.ffn_down = loader.matrix(blk + "ffn_down", config.n_ff, n_embd);
        layers.push_back(layer);
    }
    loader.refuse_unknown();
    buffer_ = allocate_tensors(context_.get(), backend, "the drafter's weights");
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    loader.upload();
}

} // namespace laguna
