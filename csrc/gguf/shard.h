#pragma once

#include "gguf/file.h"

namespace laguna {

/// What one GGUF file (a whole model or one shard) contains; views point into its mapping.
struct Shard {
    uint32_t version = 0;
    uint32_t alignment = 0;
    std::vector<std::pair<std::string, Value>> metadata;
    std::vector<TensorInfo> tensors;
};

/// Parses and checks one mapped file. Throws Error(checkpoint).
Shard parse_shard(const MappedFile &mapping, const std::string &file);

} // namespace laguna
