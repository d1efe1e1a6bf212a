#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace laguna {

class MappedFile;
struct Shard;

/// Limits of what is accepted, far above any published file. Sizes are also held to the bytes that the file has.
namespace gguf_limits {
constexpr uint64_t max_keys = 65536;
constexpr uint64_t max_tensors = 131072;
constexpr uint64_t max_key_bytes = 65535;
constexpr uint64_t max_tensor_name_bytes = 63; // ggml's GGML_MAX_NAME with its final zero
constexpr uint64_t max_string_bytes = uint64_t(64) << 20;
constexpr uint64_t max_array_length = uint64_t(64) << 20;
constexpr uint32_t max_dims = 4;
constexpr uint32_t max_alignment = 1u << 20;
constexpr uint64_t max_shards = 4096;
} // namespace gguf_limits

/// Value types of GGUF metadata, with the numbers they have in the file.
enum class ValueType : uint32_t {
    u8 = 0,
    i8 = 1,
    u16 = 2,
    i16 = 3,
    u32 = 4,
    i32 = 5,
    f32 = 6,
    boolean = 7,
    string = 8,
    array = 9,
    u64 = 10,
    i64 = 11,
    f64 = 12,
};

/// A metadata array. Numbers and bools stay in the mapped file, unaligned and little-endian.
struct ArrayValue {
    ValueType element;
    uint64_t length;
    const uint8_t *data;                   // numbers and bools: length * value_size(element) bytes
    std::vector<std::string_view> strings; // element == string
};

struct Value {
    ValueType type;
    std::variant<uint64_t, int64_t, double, bool, std::string_view, ArrayValue> data;
};

/// Bytes of one element of a numeric or bool type, 0 for string and array.
size_t value_size(ValueType type);

struct TensorInfo {
    std::string name;
    int type;      // ggml_type
    int64_t ne[4]; // ggml order: ne[0] is contiguous
    int n_dims;
    size_t n_bytes;
    const uint8_t *data;
};

/// A GGUF file, version 2 or 3, or all shards of a split one.
///
/// Everything is checked before anything is allocated by a number of the file or handed on: sizes against the file's
/// length, types against ggml, offsets against alignment, end and one another. Pointers and views stay valid as long as
/// the object lives. Not copyable; read-only and so safe for concurrent readers.
class File {
  public:
    /// `path`: a GGUF file; any shard of a split one opens all shards. Throws Error(checkpoint).
    explicit File(const std::filesystem::path &path);
    ~File();
    File(const File &) = delete;
    File &operator=(const File &) = delete;

    const std::vector<std::filesystem::path> &paths() const { return paths_; }
    uint32_t version() const { return version_; }
    uint32_t alignment() const { return alignment_; }

    /// Metadata of the first shard, in file order.
    const std::vector<std::pair<std::string, Value>> &metadata() const { return metadata_; }
    /// The value of a key, or null.
    const Value *find(std::string_view key) const;

    /// Tensors of all shards, in file order.
    const std::vector<TensorInfo> &tensors() const { return tensors_; }
    const TensorInfo *tensor(std::string_view name) const;

  private:
    void add_all_shards(const std::vector<std::filesystem::path> &paths);
    void add_shard(const std::filesystem::path &path, std::unique_ptr<MappedFile> mapping, Shard shard);
    void index_names();

    std::vector<std::filesystem::path> paths_;
    std::vector<std::unique_ptr<MappedFile>> mappings_;
    uint32_t version_ = 0;
    uint32_t alignment_ = 0;
    std::vector<std::pair<std::string, Value>> metadata_;
    std::unordered_map<std::string_view, size_t> key_index_;
    std::vector<TensorInfo> tensors_;
    std::unordered_map<std::string_view, size_t> tensor_index_;
};

} // namespace laguna
