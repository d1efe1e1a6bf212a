// The target's embedding rows and output head, used where llama.cpp holds them (no second copy).
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstdint>
#include <string>
#include <vector>

struct llama_model;

namespace laguna {

class TargetTensors {
  public:
    // Looks the two tensors up in a live model; throws TargetMismatchError when they are absent or do not fit.
    TargetTensors(const llama_model *model, int64_t n_embd, int64_t n_vocab);

    ggml_tensor *output() const { return output_; } // [n_embd, n_vocab]
    ggml_backend_dev_t output_device() const;
    void embed(int32_t token, float *row); // row [n_embd]

  private:
    ggml_tensor *embeddings_;
    ggml_tensor *output_;
    std::vector<uint8_t> bytes_; // one quantised row
};

// Registry name of the device that holds the model's output head.
std::string output_device_name(const llama_model *model);

} // namespace laguna
