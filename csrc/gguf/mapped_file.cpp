#include "gguf/mapped_file.h"

#include "error.h"

#include <limits>
#include <system_error>

#ifdef _WIN32
#include <fstream>
#else
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace laguna {

namespace {

[[noreturn]] void fail(const std::filesystem::path &path, const std::string &what) {
    throw Error(ErrorKind::checkpoint, display_path(path) + ": " + what);
}

} // namespace

std::string display_path(const std::filesystem::path &path) { return path.u8string(); }

#ifdef _WIN32

MappedFile::MappedFile(const std::filesystem::path &path) {
    std::error_code status;
    if (!std::filesystem::is_regular_file(path, status)) {
        fail(path, "no such regular file");
    }
    const uintmax_t size = std::filesystem::file_size(path, status);
    if (status || size == 0 || size > std::numeric_limits<size_t>::max() / 2) {
        fail(path, "empty or unreadable file");
    }
    copy_.resize(static_cast<size_t>(size));
    std::ifstream stream(path, std::ios::binary);
    stream.read(reinterpret_cast<char *>(copy_.data()), static_cast<std::streamsize>(copy_.size()));
    if (!stream) {
        fail(path, "could not be read completely");
    }
    data_ = copy_.data();
    size_ = copy_.size();
}

MappedFile::~MappedFile() = default;

#else

MappedFile::MappedFile(const std::filesystem::path &path) {
    // O_NONBLOCK: opening a FIFO would wait for a writer before fstat could refuse it.
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) {
        fail(path, std::string("cannot be opened: ") + std::strerror(errno));
    }
    struct stat status = {};
    if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
        ::close(descriptor);
        fail(path, "not a regular file");
    }
    if (status.st_size <= 0) {
        ::close(descriptor);
        fail(path, "the file is empty");
    }
    size_ = static_cast<size_t>(status.st_size);
    void *address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    const int error = errno;
    ::close(descriptor); // the mapping stays
    if (address == MAP_FAILED) {
        fail(path, std::string("cannot be mapped: ") + std::strerror(error));
    }
    data_ = static_cast<const uint8_t *>(address);
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) {
        ::munmap(const_cast<uint8_t *>(data_), size_);
    }
}

#endif

} // namespace laguna
