#pragma once

#include <pybind11/pybind11.h>

namespace laguna {

/// Registers GgufFile, GgufTensor and the functions on ggml types.
void bind_gguf(pybind11::module_ &m);

} // namespace laguna
