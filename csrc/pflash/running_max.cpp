#include "pflash/running_max.h"

#include "pflash/attention.h"

#include <algorithm>

namespace laguna {

namespace {

constexpr int64_t POOL = 13;

void average_pool(const std::vector<double> &values, float *pooled) {
    const int64_t n = static_cast<int64_t>(values.size());
    for (int64_t i = 0; i < n; ++i) {
        const int64_t begin = std::max<int64_t>(0, i - POOL / 2);
        const int64_t end = std::min(n, i + POOL / 2 + 1);
        double sum = 0.0;
        for (int64_t j = begin; j < end; ++j) {
            sum += values[static_cast<size_t>(j)];
        }
        pooled[i] = static_cast<float>(sum / static_cast<double>(end - begin));
    }
}

} // namespace

bool running_max(const AttentionCapture &capture, int n_threads, const std::string &device, float *importance) {
    const AttentionShape &shape = capture.shape();
    const int64_t n_tokens = capture.n_tokens(); // throws when a layer lacks rows
    const int64_t n_rows = capture.query_end() - capture.query_begin();
    Backends backends(device_by_name(device), n_threads);
    AttentionSweep sweep(backends, shape.n_head, shape.n_head_kv, shape.head_dim, GGML_TYPE_F16);
    std::vector<float> highest(static_cast<size_t>(n_rows * n_tokens), 0.0f);
    for (size_t layer = 0; layer < capture.n_layers(); ++layer) {
        std::vector<AttentionSweep::Row> rows;
        for (int64_t row = 0; row < n_rows; ++row) {
            rows.push_back({capture.query(layer, row), {{0, capture.query_begin() + row + 1}}});
        }
        const bool sound =
            sweep.run(capture.keys(layer), rows, [&](size_t row, int64_t begin, int64_t n, const float *probabilities) {
                float *out = highest.data() + static_cast<int64_t>(row) * n_tokens + begin;
                for (int64_t i = 0; i < n; ++i) {
                    out[i] = std::max(out[i], probabilities[i]);
                }
            });
        if (!sound) {
            return false;
        }
    }
    std::vector<double> mean(static_cast<size_t>(n_tokens), 0.0);
    for (int64_t row = 0; row < n_rows; ++row) {
        for (int64_t i = 0; i < n_tokens; ++i) {
            mean[static_cast<size_t>(i)] +=
                highest[static_cast<size_t>(row * n_tokens + i)] / static_cast<double>(n_rows);
        }
    }
    average_pool(mean, importance);
    return true;
}

} // namespace laguna
