#include "dflash/drafter.h"

#include "error.h"

#include <algorithm>
#include <limits>
#include <string>

namespace laguna {

namespace {

constexpr size_t MAX_CONTEXT_GRAPHS = 20;
constexpr size_t MAX_BLOCK_GRAPHS = 8; // each holds logits of its own

// Rows go to the device in pieces of fixed sizes, so that few graphs serve every length.
constexpr int64_t CHUNKS[] = {128, 64, 32};
constexpr int64_t LARGEST_EXACT = 16; // up to here (a round's rows) every length has its own graph

int64_t next_chunk(int64_t n_rows) {
    for (const int64_t chunk : CHUNKS) {
        if (n_rows >= chunk) {
            return chunk;
        }
    }
    return std::min(n_rows, LARGEST_EXACT);
}

DrafterConfig checked(DrafterConfig config) {
    config.validate();
    return config;
}

int32_t lowest_maximum(const float *row, int64_t n) {
    // Two plain passes vectorise; one pass that tracks an index does not.
    constexpr int64_t LANES = 16;
    float lanes[LANES];
    std::fill(lanes, lanes + LANES, row[0]);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int64_t lane = 0; lane < LANES; ++lane) {
            lanes[lane] = row[i + lane] > lanes[lane] ? row[i + lane] : lanes[lane];
        }
    }
    float highest = *std::max_element(lanes, lanes + LANES);
    for (; i < n; ++i) {
        highest = std::max(highest, row[i]);
    }
    const float *found = std::find(row, row + n, highest);
    return found == row + n ? 0 : static_cast<int32_t>(found - row); // not found: every logit is NaN
}

} // namespace

Drafter::Drafter(DrafterConfig config, const TensorSources &sources, int n_threads, const std::string &device)
    : config_(checked(std::move(config))), backends_(device_by_name(device), n_threads),
      weights_(config_, sources, backends_.main()), cache_(config_, backends_.main()),
      context_graphs_(MAX_CONTEXT_GRAPHS), block_graphs_(MAX_BLOCK_GRAPHS) {}

void Drafter::bind_target(const llama_model *model) {
    TargetTensors target(model, config_.n_embd, config_.n_vocab);
    std::vector<float> mask_row(static_cast<size_t>(config_.n_embd));
    target.embed(static_cast<int32_t>(config_.mask_token_id), mask_row.data());
    backends_.add(target.output_device());
    limit_vocabulary({}, GGML_TYPE_F32, nullptr, 0); // rows of another target
    mask_row_ = std::move(mask_row);
    target_ = std::move(target);
}

void Drafter::unbind_target() {
    block_graphs_.clear();
    target_.reset();
}

void Drafter::limit_vocabulary(std::vector<int32_t> ids, ggml_type type, const uint8_t *rows, size_t n_bytes) {
    for (size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] < 0 || ids[i] >= config_.n_vocab || (i > 0 && ids[i] <= ids[i - 1])) {
            throw Error(ErrorKind::config, "draft vocabulary: needed ascending ids in 0.." +
                                               std::to_string(config_.n_vocab - 1) + "; found " +
                                               std::to_string(ids[i]) + " at " + std::to_string(i));
        }
    }
    ContextPtr context;
    BufferPtr buffer;
    ggml_tensor *output = nullptr;
    if (!ids.empty()) {
        const bool fits = type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size(type) > 0 &&
                          config_.n_embd % ggml_blck_size(type) == 0 &&
                          n_bytes == ids.size() * ggml_row_size(type, config_.n_embd);
        if (!fits) {
            throw Error(ErrorKind::config, "draft vocabulary: " + std::to_string(n_bytes) + " bytes are not " +
                                               std::to_string(ids.size()) + " rows of the output head");
        }
        context = new_context(1);
        output = ggml_new_tensor_2d(context.get(), type, config_.n_embd, static_cast<int64_t>(ids.size()));
        buffer = allocate_tensors(context.get(), backends_.main(), "the output rows of the draft vocabulary");
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_tensor_set(output, rows, 0, n_bytes);
    }
    block_graphs_.clear(); // they hold the old tensor
    limited_output_ = output;
    limited_buffer_ = std::move(buffer);
    limited_context_ = std::move(context);
    limited_ids_ = std::move(ids);
}

void Drafter::check_rows(int64_t n_rows, int64_t start_position) const {
    cache_.check_start(start_position, position());
    if (start_position + n_rows > INT32_MAX) {
        throw Error(ErrorKind::rollback, "position " + std::to_string(start_position + n_rows) + " is beyond 2^31 - 1");
    }
}

void Drafter::append(const float *features, int64_t n_rows, int64_t start_position) {
    if (n_rows == 0) {
        return;
    }
    check_rows(n_rows, start_position);
    flush();
    cache_.begin(start_position);
    add(features, n_rows);
}

void Drafter::defer(const float *features, int64_t n_rows, int64_t start_position) {
    if (n_rows == 0) {
        return;
    }
    check_rows(n_rows, start_position);
    if (n_deferred() + n_rows > CHUNKS[0]) {
        flush();
    }
    cache_.begin(start_position);
    deferred_.insert(deferred_.end(), features, features + n_rows * row_size());
}

void Drafter::flush() {
    try {
        add(deferred_.data(), n_deferred());
    } catch (...) {
        deferred_.clear(); // the cache may hold some of them: none may be added twice
        throw;
    }
    deferred_.clear();
}

// Rows that follow those of the cache, to the device.
void Drafter::add(const float *features, int64_t n_rows) {
    if (n_rows > config_.window - 1) { // no query will ever see the older ones
        const int64_t dropped = n_rows - (config_.window - 1);
        cache_.skip(dropped);
        features += dropped * row_size();
        n_rows -= dropped;
    }
    while (n_rows > 0) {
        const int64_t n = next_chunk(n_rows);
        store(features, n);
        features += n * row_size();
        n_rows -= n;
    }
}

void Drafter::rollback(int64_t position) {
    if (position > cache_.position() && position <= this->position()) {
        deferred_.resize(static_cast<size_t>((position - cache_.position()) * row_size()));
        return;
    }
    if (position > this->position()) {
        flush(); // the refusal below then names the right range
    }
    cache_.rollback(position);
    deferred_.clear();
}

void Drafter::reset() {
    deferred_.clear();
    cache_.reset();
}

void Drafter::store(const float *features, int64_t n_rows) {
    ContextGraph &context = context_graphs_.get(
        n_rows, [&] { return std::make_unique<ContextGraph>(config_, weights_, cache_, backends_, n_rows); });
    const int64_t n_kv = config_.n_head_kv * config_.head_dim;
    positions_.resize(static_cast<size_t>(n_rows));
    slots_.resize(static_cast<size_t>(n_rows));
    cells_.resize(static_cast<size_t>(n_rows * n_kv));
    for (int64_t row = 0; row < n_rows; ++row) {
        const int64_t slot = cache_.slot(cache_.position() + row);
        positions_[static_cast<size_t>(row)] = static_cast<int32_t>(cache_.rope_position(cache_.position() + row));
        slots_[static_cast<size_t>(row)] = slot;
        for (int64_t i = 0; i < n_kv; ++i) {
            cells_[static_cast<size_t>(row * n_kv + i)] = i * cache_.n_slots() + slot;
        }
    }
    ggml_backend_tensor_set(context.features, features, 0, ggml_nbytes(context.features));
    ggml_backend_tensor_set(context.positions, positions_.data(), 0, ggml_nbytes(context.positions));
    ggml_backend_tensor_set(context.key_slots, slots_.data(), 0, ggml_nbytes(context.key_slots));
    ggml_backend_tensor_set(context.value_cells, cells_.data(), 0, ggml_nbytes(context.value_cells));
    context.graph->compute();
    cache_.commit(n_rows);
}

void Drafter::draft(int32_t anchor, int64_t n, bool anchored, int32_t *tokens, float *logits) {
    if (!target_) {
        throw Error(ErrorKind::target_mismatch,
                    "no target is bound: its embeddings and output head are needed to draft");
    }
    if (n < 1 || n > config_.block_size - 1) {
        throw Error(ErrorKind::config, "n is " + std::to_string(n) + "; needed 1.." +
                                           std::to_string(config_.block_size - 1) + " (block_size - 1)");
    }
    if (anchor < 0 || anchor >= config_.n_vocab) {
        throw Error(ErrorKind::config,
                    "anchor token is " + std::to_string(anchor) + "; needed 0.." + std::to_string(config_.n_vocab - 1));
    }
    const bool output_in_host = ggml_backend_buffer_is_host(output()->buffer);
    const bool argmax = argmax_on_device || !output_in_host;
    flush();
    const int64_t n_slots = cache_.n_slots_used();
    BlockGraph &block = block_graphs_.get({n, n_slots, argmax}, [&] {
        return std::make_unique<BlockGraph>(config_, weights_, cache_, output(), backends_, n, n_slots, argmax);
    });

    const size_t width = static_cast<size_t>(config_.n_embd);
    embeddings_.resize(width * static_cast<size_t>(n + 1));
    target_->embed(anchor, embeddings_.data());
    positions_.resize(static_cast<size_t>(n + 1));
    for (int64_t row = 0; row <= n; ++row) {
        positions_[static_cast<size_t>(row)] = static_cast<int32_t>(cache_.rope_position(cache_.position() + row));
        if (row > 0) {
            std::copy(mask_row_.begin(), mask_row_.end(), embeddings_.begin() + static_cast<int64_t>(width) * row);
        }
    }
    mask_.resize(static_cast<size_t>(n_slots * (n + 1)));
    cache_.fill_mask(mask_.data(), n + 1, n_slots, anchored);

    ggml_backend_tensor_set(block.embeddings, embeddings_.data(), 0, ggml_nbytes(block.embeddings));
    ggml_backend_tensor_set(block.positions, positions_.data(), 0, ggml_nbytes(block.positions));
    ggml_backend_tensor_set(block.mask, mask_.data(), 0, ggml_nbytes(block.mask));
    block.graph->compute();

    const size_t width_out = static_cast<size_t>(block.logits->ne[0]); // V, or the draft vocabulary
    const bool limited = limited_output_ != nullptr;
    if (logits != nullptr && !limited) {
        ggml_backend_tensor_get(block.logits, logits, 0, ggml_nbytes(block.logits));
    } else if (logits != nullptr) {
        logits_.resize(width_out * static_cast<size_t>(n));
        ggml_backend_tensor_get(block.logits, logits_.data(), 0, ggml_nbytes(block.logits));
        std::fill(logits, logits + n * config_.n_vocab, -std::numeric_limits<float>::infinity());
        for (int64_t row = 0; row < n; ++row) {
            for (size_t i = 0; i < width_out; ++i) {
                logits[row * config_.n_vocab + limited_ids_[i]] = logits_[static_cast<size_t>(row) * width_out + i];
            }
        }
    }
    if (argmax) {
        ggml_backend_tensor_get(block.tokens, tokens, 0, ggml_nbytes(block.tokens));
    } else {
        const float *rows = static_cast<const float *>(block.logits->data);
        for (int64_t row = 0; row < n; ++row) {
            tokens[row] = lowest_maximum(rows + row * block.logits->ne[0], block.logits->ne[0]);
        }
    }
    for (int64_t row = 0; limited && row < n; ++row) {
        tokens[row] = limited_ids_[static_cast<size_t>(tokens[row])];
    }
}

} // namespace laguna
