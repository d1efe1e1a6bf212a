#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace laguna {

/// ggml's name of a type id in lower case ("bf16", "q4_k"). Throws Error(config) for an unknown id, like all below.
std::string type_name(int type);

/// {elements a block, bytes a block}.
std::pair<int64_t, size_t> type_size(int type);

/// Bytes of a row of `n_per_row` elements. Throws Error(config) when the row is not a whole number of blocks.
size_t row_bytes(int type, int64_t n_per_row);

/// Quantises [n_rows, n_per_row] into `out` of n_rows * row_bytes() with ggml's reference quantiser.
///
/// Throws Error(config) for types that ggml does not quantise to, or only with an importance matrix, and for values
/// that are not finite.
void quantize_rows(const float *rows, int64_t n_rows, int64_t n_per_row, int type, uint8_t *out);

/// Converts [n_rows, row_bytes()] to float [n_rows, n_per_row]. Throws Error(config) for types that are not real
/// numbers.
void dequantize_rows(const uint8_t *rows, int64_t n_rows, int64_t n_per_row, int type, float *out);

/// Whether every element of [n_rows, row_bytes()] is finite once converted to float. Throws like dequantize_rows.
bool rows_are_finite(const uint8_t *rows, int64_t n_rows, int64_t n_per_row, int type);

} // namespace laguna
