#include "gguf/types.h"

#include "error.h"

#include "ggml.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>

namespace laguna {

namespace {

[[noreturn]] void fail(const std::string &what) { throw Error(ErrorKind::config, what); }

ggml_type checked(int type) {
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_type_size(static_cast<ggml_type>(type)) == 0) {
        fail("type id " + std::to_string(type) + " is not one that this ggml has");
    }
    return static_cast<ggml_type>(type);
}

/// The types of ggml_quantize_chunk that need no importance matrix: for every other one it asserts.
bool is_quantizable(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_Q4_1:
    case GGML_TYPE_Q5_0:
    case GGML_TYPE_Q5_1:
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_Q2_K:
    case GGML_TYPE_Q3_K:
    case GGML_TYPE_Q4_K:
    case GGML_TYPE_Q5_K:
    case GGML_TYPE_Q6_K:
    case GGML_TYPE_IQ4_NL:
    case GGML_TYPE_IQ4_XS:
        return true;
    default:
        return false;
    }
}

/// Null for f32, whose rows are floats already.
ggml_to_float_t float_conversion(ggml_type type) {
    const ggml_to_float_t convert = ggml_get_type_traits(type)->to_float;
    if (convert == nullptr && type != GGML_TYPE_F32) {
        fail("type " + type_name(type) + " cannot be converted to float");
    }
    return convert;
}

void row_to_float(ggml_to_float_t convert, const uint8_t *row, size_t bytes, int64_t n_per_row, float *out) {
    if (convert == nullptr) {
        std::memcpy(out, row, bytes);
    } else {
        convert(row, out, n_per_row);
    }
}

bool is_finite(const float *values, int64_t count) {
    return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

} // namespace

std::string type_name(int type) {
    std::string name = ggml_type_name(checked(type));
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    return name;
}

std::pair<int64_t, size_t> type_size(int type) {
    return {ggml_blck_size(checked(type)), ggml_type_size(checked(type))};
}

size_t row_bytes(int type, int64_t n_per_row) {
    const auto [block, block_bytes] = type_size(type);
    if (n_per_row <= 0 || n_per_row % block != 0) {
        fail("rows of " + std::to_string(n_per_row) + " elements, type " + type_name(type) + " needs a multiple of " +
             std::to_string(block));
    }
    return static_cast<size_t>(n_per_row / block) * block_bytes;
}

void quantize_rows(const float *rows, int64_t n_rows, int64_t n_per_row, int type, uint8_t *out) {
    const ggml_type ggml = checked(type);
    row_bytes(type, n_per_row);
    if (!is_quantizable(ggml)) {
        fail("type " + type_name(type) + " is not one that weights can be quantised to");
    }
    if (!is_finite(rows, n_rows * n_per_row)) {
        fail("values to quantise are not all finite");
    }
    if (n_rows > 0) {
        ggml_quantize_chunk(ggml, rows, out, 0, n_rows, n_per_row, nullptr);
    }
}

void dequantize_rows(const uint8_t *rows, int64_t n_rows, int64_t n_per_row, int type, float *out) {
    const ggml_to_float_t convert = float_conversion(checked(type));
    const size_t bytes = row_bytes(type, n_per_row);
    for (int64_t row = 0; row < n_rows; ++row) {
        row_to_float(convert, rows + static_cast<size_t>(row) * bytes, bytes, n_per_row, out + row * n_per_row);
    }
}

bool rows_are_finite(const uint8_t *rows, int64_t n_rows, int64_t n_per_row, int type) {
    const ggml_to_float_t convert = float_conversion(checked(type));
    const size_t bytes = row_bytes(type, n_per_row);
    std::vector<float> buffer(static_cast<size_t>(n_per_row));
    for (int64_t row = 0; row < n_rows; ++row) {
        row_to_float(convert, rows + static_cast<size_t>(row) * bytes, bytes, n_per_row, buffer.data());
        if (!is_finite(buffer.data(), n_per_row)) {
            return false;
        }
    }
    return true;
}

} // namespace laguna
