// The all-layer scorer: attention of the query rows in every full-attention layer, the highest over heads and layers.
#pragma once

#include "ggml/backend.h"
#include "pflash/attention_capture.h"

#include <string>

namespace laguna {

// importance [n_tokens]: for the captured query rows, causal softmax over the captured keys of each layer; per row and
// key the maximum over heads and layers; mean over rows; centred average pool over 13 tokens (fewer at the ends).
// False when a value is not finite.
bool running_max(const AttentionCapture &capture, int n_threads, const std::string &device, float *importance);

} // namespace laguna
