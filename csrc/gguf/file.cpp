#include "gguf/file.h"

#include "error.h"
#include "gguf/mapped_file.h"
#include "gguf/shard.h"

#include <cstdio>
#include <iterator>
#include <optional>

namespace laguna {

namespace {

using Metadata = std::vector<std::pair<std::string, Value>>;

[[noreturn]] void fail(const std::filesystem::path &path, const std::string &what) {
    throw Error(ErrorKind::checkpoint, display_path(path) + ": " + what);
}

/// A whole number of any integer type, or nothing when the key is absent. Throws when it is of another type or
/// negative.
std::optional<uint64_t> find_count(const Metadata &metadata, std::string_view key, const std::filesystem::path &path) {
    for (const auto &[name, value] : metadata) {
        if (name != key) {
            continue;
        }
        if (const auto *number = std::get_if<uint64_t>(&value.data)) {
            return *number;
        }
        if (const auto *number = std::get_if<int64_t>(&value.data); number != nullptr && *number >= 0) {
            return static_cast<uint64_t>(*number);
        }
        fail(path, std::string(key) + " is not a whole number >= 0");
    }
    return std::nullopt;
}

/// How the file name of one shard ends; `index` counts from 1.
std::string shard_suffix(uint64_t index, uint64_t count) {
    char suffix[64];
    std::snprintf(suffix, sizeof(suffix), "-%05llu-of-%05llu.gguf", static_cast<unsigned long long>(index),
                  static_cast<unsigned long long>(count));
    return suffix;
}

/// The paths of all shards, derived from the name of one.
std::vector<std::filesystem::path> shard_paths(const std::filesystem::path &path, uint64_t number, uint64_t count) {
    const std::string name = path.filename().u8string();
    const std::string suffix = shard_suffix(number + 1, count);
    if (name.size() < suffix.size() || name.compare(name.size() - suffix.size(), suffix.size(), suffix) != 0) {
        fail(path, "shard " + std::to_string(number + 1) + " of " + std::to_string(count) +
                       " by its metadata, so its name has to end in " + suffix);
    }
    const std::string prefix = name.substr(0, name.size() - suffix.size());
    std::vector<std::filesystem::path> paths;
    paths.reserve(static_cast<size_t>(count));
    for (uint64_t index = 1; index <= count; ++index) {
        const auto shard = path.parent_path() / std::filesystem::u8path(prefix + shard_suffix(index, count));
        if (!std::filesystem::exists(shard)) {
            fail(shard, "missing shard " + std::to_string(index) + " of " + std::to_string(count));
        }
        paths.push_back(shard);
    }
    return paths;
}

} // namespace

File::File(const std::filesystem::path &path) {
    auto mapping = std::make_unique<MappedFile>(path);
    Shard shard = parse_shard(*mapping, display_path(path));
    const uint64_t count = find_count(shard.metadata, "split.count", path).value_or(1);
    const uint64_t number = find_count(shard.metadata, "split.no", path).value_or(0);
    if (count <= 1) {
        add_shard(path, std::move(mapping), std::move(shard));
    } else {
        if (count > gguf_limits::max_shards || number >= count) {
            fail(path, "split.no " + std::to_string(number) + " of split.count " + std::to_string(count) +
                           ", at most " + std::to_string(gguf_limits::max_shards) + " shards are accepted");
        }
        add_all_shards(shard_paths(path, number, count));
    }
    index_names();
}

void File::add_all_shards(const std::vector<std::filesystem::path> &paths) {
    for (size_t i = 0; i < paths.size(); ++i) {
        auto mapping = std::make_unique<MappedFile>(paths[i]);
        Shard shard = parse_shard(*mapping, display_path(paths[i]));
        if (find_count(shard.metadata, "split.count", paths[i]) != paths.size() ||
            find_count(shard.metadata, "split.no", paths[i]) != i) {
            fail(paths[i], "its split.no and split.count are not those of shard " + std::to_string(i + 1) + " of " +
                               std::to_string(paths.size()));
        }
        add_shard(paths[i], std::move(mapping), std::move(shard));
    }
    const auto total = find_count(metadata_, "split.tensors.count", paths_[0]);
    if (total && *total != tensors_.size()) {
        fail(paths_[0], "split.tensors.count is " + std::to_string(*total) + ", the shards have " +
                            std::to_string(tensors_.size()) + " tensors");
    }
}

void File::add_shard(const std::filesystem::path &path, std::unique_ptr<MappedFile> mapping, Shard shard) {
    if (paths_.empty()) {
        version_ = shard.version;
        alignment_ = shard.alignment;
        metadata_ = std::move(shard.metadata);
    }
    std::move(shard.tensors.begin(), shard.tensors.end(), std::back_inserter(tensors_));
    paths_.push_back(path);
    mappings_.push_back(std::move(mapping));
}

void File::index_names() {
    // Both vectors are complete now, so views of their names stay valid.
    for (size_t i = 0; i < metadata_.size(); ++i) {
        key_index_.emplace(metadata_[i].first, i);
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
        if (!tensor_index_.emplace(tensors_[i].name, i).second) {
            fail(paths_[0], "tensor '" + tensors_[i].name + "' is in more than one shard");
        }
    }
}

File::~File() = default;

const Value *File::find(std::string_view key) const {
    const auto found = key_index_.find(key);
    return found == key_index_.end() ? nullptr : &metadata_[found->second].second;
}

const TensorInfo *File::tensor(std::string_view name) const {
    const auto found = tensor_index_.find(name);
    return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

} // namespace laguna
