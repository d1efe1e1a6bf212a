#include "pflash/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace laguna {

namespace {

constexpr int64_t MAX_TILE_ROWS = 64;
constexpr int64_t MIN_TILE_ROWS = 4;

int64_t padded_rows(size_t n_rows) {
    int64_t n = MIN_TILE_ROWS;
    while (n < static_cast<int64_t>(n_rows)) {
        n *= 2;
    }
    return n;
}

// exp for x <= 0 in plain arithmetic, so that compilers vectorise it; relative error below 2e-7, 0 below -87.
// e^x = 2^k e^r with |r| <= ln(2)/2, e^r by its Taylor polynomial of degree 7.
inline float exp_negative(float x) {
    constexpr float LOG2_E = 1.44269504f;
    constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    constexpr float ROUND = 12582912.0f; // 1.5 * 2^23: adding it rounds to the nearest integer
    const float clamped = x < -87.0f ? -87.0f : x;
    const float k = (clamped * LOG2_E + ROUND) - ROUND;
    const float r = clamped - k * LN2_HIGH - k * LN2_LOW;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union {
        int32_t i;
        float f;
    } scale = {(static_cast<int32_t>(k) + 127) << 23};
    return x < -87.0f ? 0.0f : p * scale.f;
}

struct Softmax {
    float max = -std::numeric_limits<float>::infinity(); // of the unscaled scores
    double sum = 0.0;                                    // of exp((score - max) * scale)

    void add(const float *scores, int64_t n, float scale) {
        float highest = max;
        bool finite = true;
        for (int64_t i = 0; i < n; ++i) {
            highest = scores[i] > highest ? scores[i] : highest;
            finite = finite && std::isfinite(scores[i]);
        }
        if (!finite) {
            sum = std::numeric_limits<double>::quiet_NaN();
            return;
        }
        sum *= std::isfinite(max) ? std::exp((static_cast<double>(max) - highest) * scale) : 0.0;
        max = highest;
        // Lanes keep the additions independent; each adds at most BLOCK / LANES values in float.
        constexpr int64_t LANES = 16;
        float lanes[LANES] = {};
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) {
            for (int64_t lane = 0; lane < LANES; ++lane) {
                lanes[lane] += exp_negative((scores[i + lane] - highest) * scale);
            }
        }
        for (; i < n; ++i) {
            sum += exp_negative((scores[i] - highest) * scale);
        }
        for (const float lane : lanes) {
            sum += lane;
        }
    }

    bool sound() const { return std::isfinite(sum) && sum > 0.0; }
};

// The parts of the allowed ranges that lie in a block, as offsets into the block.
template <typename Use>
void for_each_range(const std::vector<KeyRange> &allowed, int64_t block_begin, int64_t n_keys, const Use &use) {
    const int64_t block_end = std::min(block_begin + KeyStore::BLOCK, n_keys);
    for (const KeyRange &range : allowed) {
        const int64_t begin = std::max(range.begin, block_begin);
        const int64_t end = std::min(range.end, block_end);
        if (begin < end) {
            use(begin - block_begin, end - begin);
        }
    }
}

} // namespace

AttentionSweep::AttentionSweep(Backends &backends, int64_t n_head, int64_t n_head_kv, int64_t head_dim,
                               ggml_type key_type)
    : backends_(backends), n_head_(n_head), n_head_kv_(n_head_kv), head_dim_(head_dim), key_type_(key_type),
      graphs_(8) {}

std::unique_ptr<AttentionSweep::Graph> AttentionSweep::build(int64_t n_rows) {
    auto result = std::make_unique<Graph>();
    const int64_t group = n_head_ / n_head_kv_;
    result->graph = std::make_unique<FixedGraph>(backends_, 16, [&](ggml_context *ctx, ggml_cgraph *gf) {
        result->keys = ggml_new_tensor_3d(ctx, key_type_, head_dim_, KeyStore::BLOCK, n_head_kv_);
        result->rows = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, head_dim_, n_rows * group, n_head_kv_);
        ggml_set_input(result->keys);
        ggml_set_input(result->rows);
        result->scores = ggml_mul_mat(ctx, result->keys, result->rows);
        ggml_set_output(result->scores);
        ggml_build_forward_expand(gf, result->scores);
    });
    return result;
}

const float *AttentionSweep::compute(Graph &graph, const KeyStore &keys, size_t block,
                                     const std::vector<float> &packed) {
    ggml_backend_tensor_set(graph.keys, keys.block(block), 0, keys.block_bytes());
    ggml_backend_tensor_set(graph.rows, packed.data(), 0, ggml_nbytes(graph.rows));
    graph.graph->compute();
    if (ggml_backend_buffer_is_host(graph.scores->buffer)) {
        return static_cast<const float *>(graph.scores->data);
    }
    host_scores_.resize(static_cast<size_t>(ggml_nelements(graph.scores)));
    ggml_backend_tensor_get(graph.scores, host_scores_.data(), 0, ggml_nbytes(graph.scores));
    return host_scores_.data();
}

bool AttentionSweep::run_tile(const KeyStore &keys, const Row *rows, size_t n_rows, size_t first_row,
                              const Visit &visit) {
    const int64_t n_padded = padded_rows(n_rows);
    const int64_t group = n_head_ / n_head_kv_;
    const size_t dim = static_cast<size_t>(head_dim_);
    Graph &graph = graphs_.get(n_padded, [&] { return build(n_padded); });
    // The query heads of one KV head stand together: [n_head_kv, n_padded, group, head_dim].
    std::vector<float> packed(static_cast<size_t>(n_padded * n_head_) * dim, 0.0f);
    for (size_t row = 0; row < n_rows; ++row) {
        for (int64_t head = 0; head < n_head_; ++head) {
            const int64_t place = (head / group * n_padded + static_cast<int64_t>(row)) * group + head % group;
            std::copy_n(rows[row].q + static_cast<size_t>(head) * dim, dim,
                        packed.data() + static_cast<size_t>(place) * dim);
        }
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    std::vector<Softmax> softmax(n_rows * static_cast<size_t>(n_head_));
    std::vector<float> probabilities(static_cast<size_t>(KeyStore::BLOCK));

    const auto for_each_head = [&](const float *scores, const auto &use) {
        for (size_t row = 0; row < n_rows; ++row) {
            for (int64_t head = 0; head < n_head_; ++head) {
                const int64_t place = (head / group * n_padded + static_cast<int64_t>(row)) * group + head % group;
                use(row, softmax[row * static_cast<size_t>(n_head_) + static_cast<size_t>(head)],
                    scores + place * KeyStore::BLOCK);
            }
        }
    };
    for (size_t block = 0; block < keys.n_blocks(); ++block) {
        const int64_t begin = static_cast<int64_t>(block) * KeyStore::BLOCK;
        for_each_head(compute(graph, keys, block, packed), [&](size_t row, Softmax &sum, const float *scores) {
            for_each_range(rows[row].allowed, begin, keys.n_tokens(),
                           [&](int64_t first, int64_t n) { sum.add(scores + first, n, scale); });
        });
    }
    if (!std::all_of(softmax.begin(), softmax.end(), [](const Softmax &sum) { return sum.sound(); })) {
        return false;
    }
    for (size_t block = 0; block < keys.n_blocks(); ++block) {
        const int64_t begin = static_cast<int64_t>(block) * KeyStore::BLOCK;
        for_each_head(compute(graph, keys, block, packed), [&](size_t row, const Softmax &sum, const float *scores) {
            for_each_range(rows[row].allowed, begin, keys.n_tokens(), [&](int64_t first, int64_t n) {
                const float inverse = static_cast<float>(1.0 / sum.sum);
                const float highest = sum.max;
                for (int64_t i = 0; i < n; ++i) {
                    probabilities[static_cast<size_t>(i)] =
                        exp_negative((scores[first + i] - highest) * scale) * inverse;
                }
                visit(first_row + row, begin + first, n, probabilities.data());
            });
        });
    }
    return true;
}

bool AttentionSweep::run(const KeyStore &keys, const std::vector<Row> &rows, const Visit &visit) {
    for (size_t first = 0; first < rows.size(); first += MAX_TILE_ROWS) {
        const size_t n = std::min(rows.size() - first, static_cast<size_t>(MAX_TILE_ROWS));
        if (!run_tile(keys, rows.data() + first, n, first, visit)) {
            return false;
        }
    }
    return true;
}

} // namespace laguna
