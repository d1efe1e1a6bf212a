// The drafter's two computations as ggml graphs. Formulas: docs/dflash.md.
#pragma once

#include "dflash/config.h"
#include "dflash/context_cache.h"
#include "dflash/weights.h"
#include "ggml/backend.h"

#include <memory>

namespace laguna {

// Context update: residual rows of m new target positions -> keys and values in the cache.
struct ContextGraph {
    ggml_tensor *features = nullptr;    // [H, A, m]
    ggml_tensor *positions = nullptr;   // [m] i32
    ggml_tensor *key_slots = nullptr;   // [m] i64: column of the key cache
    ggml_tensor *value_cells = nullptr; // [m D nkv] i64: element of the transposed value cache
    std::unique_ptr<FixedGraph> graph;

    ContextGraph(const DrafterConfig &config, const Weights &weights, const ContextCache &cache, Backends &backends,
                 int64_t n_rows);
};

// Block: anchor and n masks -> logits of the n drafted positions.
struct BlockGraph {
    ggml_tensor *embeddings = nullptr; // [H, n + 1]
    ggml_tensor *positions = nullptr;  // [n + 1] i32
    ggml_tensor *mask = nullptr;       // [n_slots, n + 1] f32
    ggml_tensor *logits = nullptr;     // [V, n]
    ggml_tensor *tokens = nullptr;     // [n] i32, lowest id of the row's maximum; null when logits are in host memory
    std::unique_ptr<FixedGraph> graph;

    // n_slots: how many cache slots are looked at (ContextCache::n_slots_used). argmax: build `tokens` on the device.
    BlockGraph(const DrafterConfig &config, const Weights &weights, const ContextCache &cache, ggml_tensor *output,
               Backends &backends, int64_t n_draft, int64_t n_slots, bool argmax);
};

} // namespace laguna
