#include "gguf/shard.h"

#include "gguf/mapped_file.h"
#include "gguf/reader.h"

#include "ggml.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF files are read in place, which needs a little-endian machine"
#endif

namespace laguna {

namespace {

constexpr char magic[4] = {'G', 'G', 'U', 'F'};
constexpr uint32_t default_alignment = 32;
// The smallest encodings: they bound the counts in the header by the bytes that follow.
constexpr uint64_t min_key_bytes = 8 + 4 + 1;        // empty name, type, one byte
constexpr uint64_t min_tensor_bytes = 8 + 4 + 4 + 8; // empty name, no dimensions, type, offset
constexpr uint64_t min_string_bytes = 8;

std::string printable(std::string_view text) {
    constexpr size_t max_shown = 80;
    std::string shown = "'";
    for (const char c : text.substr(0, max_shown)) {
        const auto byte = static_cast<unsigned char>(c);
        shown += byte >= 0x20 && byte < 0x7f ? c : '?';
    }
    return shown + (text.size() > max_shown ? "...'" : "'");
}

bool is_known(uint32_t type) { return type <= static_cast<uint32_t>(ValueType::f64); }

bool read_bool(Reader &reader, const std::string &key) {
    const auto byte = reader.number<uint8_t>("a bool");
    if (byte > 1) {
        reader.fail("key " + key + ": bool value " + std::to_string(byte) + ", needed 0 or 1");
    }
    return byte == 1;
}

ArrayValue read_array(Reader &reader, const std::string &key) {
    const auto type = reader.number<uint32_t>("an array's element type");
    if (!is_known(type)) {
        reader.fail("key " + key + ": unknown array element type " + std::to_string(type));
    }
    ArrayValue array{static_cast<ValueType>(type), reader.number<uint64_t>("an array's length"), nullptr, {}};
    if (array.element == ValueType::array) {
        reader.fail("key " + key + ": arrays of arrays are not accepted");
    }
    const uint64_t element_bytes = array.element == ValueType::string ? min_string_bytes : value_size(array.element);
    if (array.length > gguf_limits::max_array_length || array.length > reader.remaining() / element_bytes) {
        reader.fail("key " + key + ": array of " + std::to_string(array.length) + " elements, " +
                    std::to_string(reader.remaining()) + " bytes are left and at most " +
                    std::to_string(gguf_limits::max_array_length) + " elements are accepted");
    }
    if (array.element == ValueType::string) {
        array.strings.reserve(static_cast<size_t>(array.length));
        for (uint64_t i = 0; i < array.length; ++i) {
            array.strings.push_back(reader.string(gguf_limits::max_string_bytes, "an array's string"));
        }
        return array;
    }
    array.data = reader.take(array.length * element_bytes, "an array");
    if (array.element == ValueType::boolean) {
        const uint8_t *end = array.data + array.length;
        if (std::any_of(array.data, end, [](uint8_t byte) { return byte > 1; })) {
            reader.fail("key " + key + ": bool array with a value other than 0 and 1");
        }
    }
    return array;
}

Value read_value(Reader &reader, const std::string &key) {
    const auto raw_type = reader.number<uint32_t>("a value type");
    if (!is_known(raw_type)) {
        reader.fail("key " + key + ": unknown value type " + std::to_string(raw_type));
    }
    const auto type = static_cast<ValueType>(raw_type);
    const char *what = "a metadata value";
    switch (type) {
    case ValueType::u8:
        return {type, uint64_t(reader.number<uint8_t>(what))};
    case ValueType::u16:
        return {type, uint64_t(reader.number<uint16_t>(what))};
    case ValueType::u32:
        return {type, uint64_t(reader.number<uint32_t>(what))};
    case ValueType::u64:
        return {type, reader.number<uint64_t>(what)};
    case ValueType::i8:
        return {type, int64_t(reader.number<int8_t>(what))};
    case ValueType::i16:
        return {type, int64_t(reader.number<int16_t>(what))};
    case ValueType::i32:
        return {type, int64_t(reader.number<int32_t>(what))};
    case ValueType::i64:
        return {type, reader.number<int64_t>(what)};
    case ValueType::f32:
        return {type, double(reader.number<float>(what))};
    case ValueType::f64:
        return {type, reader.number<double>(what)};
    case ValueType::boolean:
        return {type, read_bool(reader, key)};
    case ValueType::string:
        return {type, reader.string(gguf_limits::max_string_bytes, "a string value")};
    case ValueType::array:
        return {type, read_array(reader, key)};
    }
    reader.fail("key " + key + ": unknown value type");
}

uint32_t read_version(Reader &reader) {
    if (std::memcmp(reader.take(sizeof(magic), "the magic"), magic, sizeof(magic)) != 0) {
        reader.fail("not a GGUF file: it does not start with \"GGUF\"");
    }
    const auto version = reader.number<uint32_t>("the version");
    if ((version & 0xffff) == 0 && version != 0) {
        reader.fail("big-endian GGUF, needed a little-endian one: convert it with gguf-py's gguf_convert_endian");
    }
    if (version != 2 && version != 3) {
        reader.fail("GGUF version " + std::to_string(version) + ", needed 2 or 3");
    }
    return version;
}

uint64_t read_count(Reader &reader, uint64_t limit, const char *what) {
    const auto count = reader.number<uint64_t>("the header");
    if (count > limit) {
        reader.fail("the header declares " + std::to_string(count) + " " + what + ", at most " + std::to_string(limit) +
                    " are accepted");
    }
    return count;
}

uint32_t alignment_of(const Shard &shard, const Reader &reader) {
    for (const auto &[key, value] : shard.metadata) {
        if (key != "general.alignment") {
            continue;
        }
        if (value.type != ValueType::u32) {
            reader.fail("general.alignment has value type " + std::to_string(static_cast<uint32_t>(value.type)) +
                        ", needed u32");
        }
        const uint64_t alignment = std::get<uint64_t>(value.data);
        if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > gguf_limits::max_alignment) {
            reader.fail("general.alignment is " + std::to_string(alignment) + ", needed a power of two up to " +
                        std::to_string(gguf_limits::max_alignment));
        }
        return static_cast<uint32_t>(alignment);
    }
    return default_alignment;
}

void read_metadata(Reader &reader, uint64_t n_keys, Shard &shard) {
    if (n_keys > reader.remaining() / min_key_bytes) {
        reader.fail("truncated: " + std::to_string(n_keys) + " keys do not fit into the file");
    }
    shard.metadata.reserve(static_cast<size_t>(n_keys));
    std::unordered_set<std::string_view> seen;
    for (uint64_t i = 0; i < n_keys; ++i) {
        const std::string_view key = reader.string(gguf_limits::max_key_bytes, "a key");
        if (key.empty()) {
            reader.fail("empty key");
        }
        if (!seen.insert(key).second) {
            reader.fail("duplicate key " + printable(key));
        }
        Value value = read_value(reader, printable(key));
        shard.metadata.emplace_back(std::string(key), std::move(value));
    }
}

struct DeclaredTensor {
    TensorInfo info;
    uint64_t offset; // from the start of the data section
};

/// Fills type, ne and n_bytes; every product is checked before it is formed.
void read_shape(Reader &reader, TensorInfo &info) {
    const std::string name = printable(info.name);
    const auto n_dims = reader.number<uint32_t>("a tensor's dimensions");
    if (n_dims > gguf_limits::max_dims) {
        reader.fail("tensor " + name + " has " + std::to_string(n_dims) + " dimensions, at most " +
                    std::to_string(gguf_limits::max_dims) + " are accepted");
    }
    info.n_dims = static_cast<int>(n_dims);
    constexpr uint64_t max_elements = std::numeric_limits<int64_t>::max();
    uint64_t n_elements = 1;
    std::fill(std::begin(info.ne), std::end(info.ne), 1);
    for (uint32_t dim = 0; dim < n_dims; ++dim) {
        const auto length = reader.number<uint64_t>("a tensor's dimension");
        if (length == 0 || length > max_elements / n_elements) {
            reader.fail("tensor " + name + ": dimension " + std::to_string(dim) + " is " + std::to_string(length) +
                        ", needed at least 1 and a product that fits into 63 bits");
        }
        n_elements *= length;
        info.ne[dim] = static_cast<int64_t>(length);
    }
    const auto type = reader.number<uint32_t>("a tensor's type");
    if (type >= GGML_TYPE_COUNT || ggml_type_size(static_cast<ggml_type>(type)) == 0) {
        reader.fail("tensor " + name + " has type " + std::to_string(type) + ", which this ggml does not know");
    }
    info.type = static_cast<int>(type);
    const auto block = static_cast<uint64_t>(ggml_blck_size(static_cast<ggml_type>(type)));
    const auto block_bytes = static_cast<uint64_t>(ggml_type_size(static_cast<ggml_type>(type)));
    if (static_cast<uint64_t>(info.ne[0]) % block != 0) {
        reader.fail("tensor " + name + ": rows of " + std::to_string(info.ne[0]) + " elements are not divisible by " +
                    "the block of " + std::to_string(block) + " that type " +
                    ggml_type_name(static_cast<ggml_type>(type)) + " needs");
    }
    if (n_elements / block > max_elements / block_bytes) {
        reader.fail("tensor " + name + ": its size in bytes overflows");
    }
    info.n_bytes = static_cast<size_t>(n_elements / block * block_bytes);
}

std::vector<DeclaredTensor> read_tensor_infos(Reader &reader, uint64_t n_tensors) {
    if (n_tensors > reader.remaining() / min_tensor_bytes) {
        reader.fail("truncated: " + std::to_string(n_tensors) + " tensors do not fit into the file");
    }
    std::vector<DeclaredTensor> declared;
    declared.reserve(static_cast<size_t>(n_tensors));
    std::unordered_set<std::string_view> seen;
    for (uint64_t i = 0; i < n_tensors; ++i) {
        const std::string_view name = reader.string(gguf_limits::max_tensor_name_bytes, "a tensor name");
        if (!seen.insert(name).second) {
            reader.fail("duplicate tensor " + printable(name));
        }
        DeclaredTensor tensor{};
        tensor.info.name = std::string(name);
        read_shape(reader, tensor.info);
        tensor.offset = reader.number<uint64_t>("a tensor's offset");
        declared.push_back(std::move(tensor));
    }
    return declared;
}

/// Turns offsets into pointers: aligned, inside the file, and no two tensors share a byte.
void place_tensors(const MappedFile &mapping, const Reader &reader, std::vector<DeclaredTensor> declared,
                   Shard &shard) {
    const uint64_t padding = (shard.alignment - reader.offset() % shard.alignment) % shard.alignment;
    const uint64_t data_start = reader.offset() + padding;
    if (!declared.empty() && data_start > mapping.size()) {
        reader.fail("truncated: the file ends before its tensor data");
    }
    const uint64_t data_bytes = declared.empty() ? 0 : mapping.size() - data_start;
    for (DeclaredTensor &tensor : declared) {
        const std::string name = printable(tensor.info.name);
        if (tensor.offset % shard.alignment != 0) {
            reader.fail("tensor " + name + ": offset " + std::to_string(tensor.offset) + " is not a multiple of the " +
                        "alignment " + std::to_string(shard.alignment));
        }
        if (tensor.offset > data_bytes || tensor.info.n_bytes > data_bytes - tensor.offset) {
            reader.fail("truncated: tensor " + name + " needs " + std::to_string(tensor.info.n_bytes) +
                        " bytes at offset " + std::to_string(tensor.offset) + ", the data section has " +
                        std::to_string(data_bytes));
        }
        tensor.info.data = mapping.data() + data_start + tensor.offset;
    }
    std::vector<const DeclaredTensor *> by_offset;
    by_offset.reserve(declared.size());
    for (const DeclaredTensor &tensor : declared) {
        by_offset.push_back(&tensor);
    }
    std::sort(by_offset.begin(), by_offset.end(), [](auto *a, auto *b) { return a->offset < b->offset; });
    for (size_t i = 1; i < by_offset.size(); ++i) {
        if (by_offset[i - 1]->offset + by_offset[i - 1]->info.n_bytes > by_offset[i]->offset) {
            reader.fail("tensors " + printable(by_offset[i - 1]->info.name) + " and " +
                        printable(by_offset[i]->info.name) + " overlap");
        }
    }
    shard.tensors.reserve(declared.size());
    for (DeclaredTensor &tensor : declared) {
        shard.tensors.push_back(std::move(tensor.info));
    }
}

} // namespace

size_t value_size(ValueType type) {
    switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean:
        return 1;
    case ValueType::u16:
    case ValueType::i16:
        return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32:
        return 4;
    case ValueType::u64:
    case ValueType::i64:
    case ValueType::f64:
        return 8;
    case ValueType::string:
    case ValueType::array:
        return 0;
    }
    return 0;
}

Shard parse_shard(const MappedFile &mapping, const std::string &file) {
    Reader reader(mapping.data(), mapping.size(), file);
    Shard shard;
    shard.version = read_version(reader);
    const uint64_t n_tensors = read_count(reader, gguf_limits::max_tensors, "tensors");
    const uint64_t n_keys = read_count(reader, gguf_limits::max_keys, "keys");
    read_metadata(reader, n_keys, shard);
    shard.alignment = alignment_of(shard, reader);
    place_tensors(mapping, reader, read_tensor_infos(reader, n_tensors), shard);
    return shard;
}

} // namespace laguna
