// The drafter's rotating context cache: keys and values of the newest target positions, by absolute position.
//
// Slots 0..n_block-1 are scratch for the rows of the block being drafted; the ring follows. A position p lives in ring
// slot p mod n_ring. The ring is a little longer than the W-1 rows that can be seen, so a short rollback loses nothing.
#pragma once

#include "dflash/config.h"
#include "ggml/backend.h"

#include <cstdint>
#include <vector>

namespace laguna {

class ContextCache {
  public:
    ContextCache(const DrafterConfig &config, ggml_backend_t backend);

    int64_t position() const { return position_; }    // next absolute position
    int64_t first_position() const { return first_; } // lowest position fed since reset
    int64_t rope_position(int64_t position) const { return position - rope_origin_; }
    int64_t n_rows() const; // contiguous rows ending at position()-1
    int64_t n_slots() const { return n_block_ + n_ring_; }
    int64_t n_block() const { return n_block_; }
    int64_t n_slots_used() const; // slots that a draft must look at, a graph size

    // Throws RollbackError when rows from `start` on do not follow `next`; an empty cache takes any start >= 0.
    void check_start(int64_t start, int64_t next) const;
    void begin(int64_t start); // an empty cache starts here; no effect otherwise
    void skip(int64_t n);      // n rows that no query can see were dropped: they count, nothing is stored
    void commit(int64_t n);    // the next n rows are stored
    int64_t slot(int64_t position) const { return n_block_ + position % n_ring_; }
    void rollback(int64_t position); // throws RollbackError, changing nothing, when rows would be missing
    void reset();

    // mask[(row), (slot)] = 0 where visible, -inf elsewhere; rows n_rows, slots n_slots (as in n_slots_used()).
    void fill_mask(float *mask, int64_t n_rows, int64_t n_slots, bool anchored) const;

    ggml_tensor *keys(size_t layer) const { return keys_[layer]; }     // [D nkv, n_slots]
    ggml_tensor *values(size_t layer) const { return values_[layer]; } // [n_slots, D nkv]: transposed
    size_t n_bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

  private:
    int64_t window_;
    int64_t n_block_;
    int64_t n_ring_;
    bool empty_ = true; // nothing fed since reset
    int64_t first_ = 0;
    int64_t position_ = 0;
    // RoPE is relative, so angles are counted from the first stored row: at absolute positions of 1e5 and more an f32
    // angle has lost 1e-3 of the logits' spread, at 1e6 1e-2. Changes only while no row is stored.
    int64_t rope_origin_ = 0;
    int64_t oldest_ = 0; // lowest position still stored; rows oldest_..position_-1 are in the ring
    ContextPtr context_;
    BufferPtr buffer_;
    std::vector<ggml_tensor *> keys_;
    std::vector<ggml_tensor *> values_;
};

} // namespace laguna
