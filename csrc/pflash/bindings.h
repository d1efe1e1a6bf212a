#pragma once

#include <pybind11/pybind11.h>

namespace laguna {

/// Registers the scorer of prompt compression: Block15Scorer, TokenStore, AttentionCapture, running_max.
void bind_pflash(pybind11::module_ &m);

} // namespace laguna
