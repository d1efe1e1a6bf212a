// Graphs of fixed shapes, kept for reuse.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <utility>

namespace laguna {

// The most recently used graphs of one kind, built on first use.
template <typename Key, typename Graph> class GraphCache {
  public:
    explicit GraphCache(size_t capacity) : capacity_(capacity) {}

    template <typename Make> Graph &get(const Key &key, Make make) {
        for (auto it = entries_.begin(); it != entries_.end(); ++it) {
            if (it->first == key) {
                entries_.splice(entries_.begin(), entries_, it);
                return *entries_.front().second;
            }
        }
        while (entries_.size() >= capacity_) {
            entries_.pop_back();
        }
        entries_.emplace_front(key, make());
        return *entries_.front().second;
    }

    void clear() { entries_.clear(); }

    size_t n_bytes() const {
        size_t total = 0;
        for (const auto &entry : entries_) {
            total += entry.second->graph->buffer_size();
        }
        return total;
    }

  private:
    size_t capacity_;
    std::list<std::pair<Key, std::unique_ptr<Graph>>> entries_;
};

} // namespace laguna
