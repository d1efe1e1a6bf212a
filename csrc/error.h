#pragma once

#include <stdexcept>
#include <string>

namespace laguna {

/// Which class of laguna_gguf.errors an error becomes in Python.
enum class ErrorKind { config, checkpoint, target_mismatch, capture, rollback, memory, scorer };

/// The one exception the native half throws on purpose.
class Error : public std::runtime_error {
  public:
    Error(ErrorKind kind, const std::string &message) : std::runtime_error(message), kind(kind) {}

    ErrorKind kind;
};

} // namespace laguna
