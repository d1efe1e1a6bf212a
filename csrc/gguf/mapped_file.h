#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace laguna {

/// A regular file as read-only memory: mapped where the system can, read into memory otherwise.
class MappedFile {
  public:
    /// Throws Error(checkpoint) when the path is not a readable, non-empty regular file.
    explicit MappedFile(const std::filesystem::path &path);
    ~MappedFile();
    MappedFile(const MappedFile &) = delete;
    MappedFile &operator=(const MappedFile &) = delete;

    const uint8_t *data() const { return data_; }
    size_t size() const { return size_; }

  private:
    const uint8_t *data_ = nullptr;
    size_t size_ = 0;
    std::vector<uint8_t> copy_; // only without mmap
};

/// The path as UTF-8, for messages.
std::string display_path(const std::filesystem::path &path);

} // namespace laguna
