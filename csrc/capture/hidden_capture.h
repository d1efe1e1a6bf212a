// llama.cpp's eval callback: copies residual rows (`l_out-<t>`) of wanted layers while a decode runs.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace laguna {

class HiddenCapture {
  public:
    // layers: 0-based, strictly increasing; n_embd: width of a residual row.
    HiddenCapture(std::vector<int> layers, int64_t n_embd);
    HiddenCapture(const HiddenCapture &) = delete;
    HiddenCapture &operator=(const HiddenCapture &) = delete;

    // ggml_backend_sched_eval_callback; user_data is the HiddenCapture.
    static bool callback(ggml_tensor *tensor, bool ask, void *user_data) noexcept;

    void begin();
    int64_t n_rows() const;                            // throws CaptureError when the layers disagree
    const float *rows() const { return data_.data(); } // [n_rows, n_layers, n_embd]
    size_t n_layers() const { return layers_.size(); }
    int64_t n_embd() const { return n_embd_; }

    bool enabled = false;
    bool stop_after_last = false;
    bool one_graph = false; // every begin() is followed by one graph: behind the stop, its further splits end at once
    uint64_t n_nonfinite = 0;
    double ms = 0.0;

  private:
    int find(const ggml_tensor *tensor) const; // index into layers_, or -1
    void copy(const ggml_tensor *tensor, size_t index);

    std::vector<int> layers_;
    int64_t n_embd_;
    std::vector<float> data_;
    std::vector<float> staging_;
    std::vector<int64_t> rows_by_layer_;
    std::string failure_;
    bool stopped_ = false;
};

} // namespace laguna
