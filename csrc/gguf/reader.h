#pragma once

#include "error.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace laguna {

/// Forward reader over a byte range; every step is checked against the end of the range.
class Reader {
  public:
    Reader(const uint8_t *data, size_t size, std::string file) : data_(data), size_(size), file_(std::move(file)) {}

    size_t offset() const { return offset_; }
    size_t remaining() const { return size_ - offset_; }
    const std::string &file() const { return file_; }

    [[noreturn]] void fail(const std::string &what) const {
        throw Error(ErrorKind::checkpoint, file_ + ": " + what + " (at byte " + std::to_string(offset_) + ")");
    }

    /// Returns `count` bytes and steps over them. `what` names them in the message.
    const uint8_t *take(uint64_t count, const char *what) {
        if (count > remaining()) {
            fail(std::string("truncated: ") + what + " needs " + std::to_string(count) + " bytes, " +
                 std::to_string(remaining()) + " are left");
        }
        const uint8_t *start = data_ + offset_;
        offset_ += static_cast<size_t>(count);
        return start;
    }

    /// Reads one little-endian number; the host is little-endian too (checked in file.cpp).
    template <typename T> T number(const char *what) {
        T value;
        std::memcpy(&value, take(sizeof(T), what), sizeof(T));
        return value;
    }

    /// Reads a u64 length and that many bytes; the view points into the range.
    std::string_view string(uint64_t max_length, const char *what) {
        const uint64_t length = number<uint64_t>(what);
        if (length > max_length) {
            fail(std::string(what) + " is " + std::to_string(length) + " bytes long, at most " +
                 std::to_string(max_length) + " are accepted");
        }
        return {reinterpret_cast<const char *>(take(length, what)), static_cast<size_t>(length)};
    }

  private:
    const uint8_t *data_;
    size_t size_;
    size_t offset_ = 0;
    std::string file_;
};

} // namespace laguna
