#include "capture/hidden_capture.h"

#include "error.h"

#include <ggml-backend.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace laguna {

namespace {

constexpr char PREFIX[] = "l_out-";
constexpr size_t PREFIX_LENGTH = sizeof(PREFIX) - 1;

} // namespace

HiddenCapture::HiddenCapture(std::vector<int> layers, int64_t n_embd)
    : layers_(std::move(layers)), n_embd_(n_embd), rows_by_layer_(layers_.size(), 0) {
    if (layers_.empty() || n_embd_ <= 0 || layers_.front() < 0 ||
        std::adjacent_find(layers_.begin(), layers_.end(), [](int a, int b) { return a >= b; }) != layers_.end()) {
        throw Error(ErrorKind::config, "capture needs strictly increasing layer numbers >= 0 and a width > 0");
    }
}

int HiddenCapture::find(const ggml_tensor *tensor) const {
    // The whole name counts: "l_out-1" is not "l_out-13", and a scheduler's copy is called "CPU#l_out-1#0".
    if (std::strncmp(tensor->name, PREFIX, PREFIX_LENGTH) != 0) {
        return -1;
    }
    char *end = nullptr;
    const long layer = std::strtol(tensor->name + PREFIX_LENGTH, &end, 10);
    if (end == tensor->name + PREFIX_LENGTH || *end != '\0') {
        return -1;
    }
    const auto it = std::lower_bound(layers_.begin(), layers_.end(), layer);
    return it != layers_.end() && *it == layer ? static_cast<int>(it - layers_.begin()) : -1;
}

bool HiddenCapture::callback(ggml_tensor *tensor, bool ask, void *user_data) noexcept {
    auto &self = *static_cast<HiddenCapture *>(user_data);
    if (!self.enabled) {
        return !ask;
    }
    if (self.stopped_) { // another device's part of the same graph: its first node, and no more
        return ask;
    }
    const int index = self.find(tensor);
    if (ask) {
        return index >= 0;
    }
    if (index < 0) {
        return true;
    }
    const auto start = std::chrono::steady_clock::now();
    try {
        self.copy(tensor, static_cast<size_t>(index));
    } catch (const std::exception &error) {
        self.failure_ = error.what(); // nothing may leave through llama.cpp's C frames
    }
    self.ms += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    const bool stop = self.stop_after_last && static_cast<size_t>(index) + 1 == self.layers_.size();
    self.stopped_ = stop && self.one_graph;
    return !stop;
}

void HiddenCapture::copy(const ggml_tensor *tensor, size_t index) {
    if (tensor->type != GGML_TYPE_F32 || tensor->ne[0] != n_embd_ || !ggml_is_contiguous(tensor)) {
        failure_ = std::string(tensor->name) + " is " + ggml_type_name(tensor->type) + " with " +
                   std::to_string(tensor->ne[0]) + " columns; needed contiguous f32 with " + std::to_string(n_embd_);
        return;
    }
    const size_t n_rows = static_cast<size_t>(tensor->ne[1] * tensor->ne[2] * tensor->ne[3]);
    const size_t width = static_cast<size_t>(n_embd_);
    const size_t stride = width * layers_.size();
    const size_t first = static_cast<size_t>(rows_by_layer_[index]);
    if (data_.size() < (first + n_rows) * stride) {
        data_.resize((first + n_rows) * stride);
    }
    // Host memory is read in place; other devices are copied once to a staging block.
    const float *source = static_cast<const float *>(tensor->data);
    if (tensor->buffer == nullptr || !ggml_backend_buffer_is_host(tensor->buffer)) {
        staging_.resize(std::max(staging_.size(), n_rows * width));
        ggml_backend_tensor_get(tensor, staging_.data(), 0, n_rows * width * sizeof(float));
        source = staging_.data();
    }
    for (size_t row = 0; row < n_rows; ++row) {
        float *out = data_.data() + (first + row) * stride + index * width;
        for (size_t i = 0; i < width; ++i) {
            const float value = source[row * width + i];
            const bool finite = std::isfinite(value);
            out[i] = finite ? value : 0.0f;
            n_nonfinite += finite ? 0 : 1;
        }
    }
    rows_by_layer_[index] += static_cast<int64_t>(n_rows);
}

void HiddenCapture::begin() {
    std::fill(rows_by_layer_.begin(), rows_by_layer_.end(), 0);
    failure_.clear();
    stopped_ = false;
}

int64_t HiddenCapture::n_rows() const {
    if (!failure_.empty()) {
        throw Error(ErrorKind::capture, "hidden capture failed: " + failure_);
    }
    for (size_t i = 1; i < layers_.size(); ++i) {
        if (rows_by_layer_[i] != rows_by_layer_[0]) {
            throw Error(
                ErrorKind::capture,
                "layer " + std::to_string(layers_[0]) + " gave " + std::to_string(rows_by_layer_[0]) + " rows, layer " +
                    std::to_string(layers_[i]) + " gave " + std::to_string(rows_by_layer_[i]) +
                    "; every captured layer must give the same rows (llama.cpp crops the last layer to the rows "
                    "whose logits flag is set)");
        }
    }
    return rows_by_layer_[0];
}

} // namespace laguna
