#include "pflash/probe.h"

namespace laguna {

namespace {

// ggml's own tanh form of GELU looks its values up in a half-precision table on the CPU: too coarse here.
ggml_tensor *gelu_tanh(ggml_context *ctx, ggml_tensor *x) {
    constexpr float SQRT_2_OVER_PI = 0.79788456080286535588f;
    ggml_tensor *cube = ggml_mul(ctx, ggml_sqr(ctx, x), x);
    ggml_tensor *inner = ggml_add(ctx, x, ggml_scale(ctx, cube, 0.044715f));
    ggml_tensor *gate = ggml_tanh(ctx, ggml_scale(ctx, inner, SQRT_2_OVER_PI));
    return ggml_mul(ctx, ggml_scale(ctx, x, 0.5f), ggml_scale_bias(ctx, gate, 1.0f, 1.0f));
}

} // namespace

Probe::Probe(const ProbeSource &source, int64_t n_embd, ggml_backend_t backend)
    : n_outputs_(source.n_outputs), norm_eps_(source.norm_eps), gelu_erf_(source.gelu_erf), context_(new_context(8)) {
    ggml_context *ctx = context_.get();
    norm_weight_ = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_embd);
    norm_bias_ = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_embd);
    fc1_weight_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, source.n_hidden);
    fc1_bias_ = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, source.n_hidden);
    fc2_weight_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, source.n_hidden, n_outputs_);
    fc2_bias_ = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_outputs_);
    buffer_ = allocate_tensors(ctx, backend, "the segment probe");
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    const auto set = [](ggml_tensor *tensor, const float *data) {
        ggml_backend_tensor_set(tensor, data, 0, ggml_nbytes(tensor));
    };
    set(norm_weight_, source.norm_weight);
    set(norm_bias_, source.norm_bias);
    set(fc1_weight_, source.fc1_weight);
    set(fc1_bias_, source.fc1_bias);
    set(fc2_weight_, source.fc2_weight);
    set(fc2_bias_, source.fc2_bias);
}

ggml_tensor *Probe::build(ggml_context *ctx, ggml_tensor *x) const {
    ggml_tensor *y = ggml_add(ctx, ggml_mul(ctx, ggml_norm(ctx, x, norm_eps_), norm_weight_), norm_bias_);
    ggml_tensor *hidden = ggml_add(ctx, ggml_mul_mat(ctx, fc1_weight_, y), fc1_bias_); // [n_hidden, m]
    hidden = gelu_erf_ ? ggml_gelu_erf(ctx, hidden) : gelu_tanh(ctx, hidden);
    return ggml_add(ctx, ggml_mul_mat(ctx, fc2_weight_, hidden), fc2_bias_); // [n_outputs, m]
}

} // namespace laguna
