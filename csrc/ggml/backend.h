// Devices, buffers and reusable graphs, through ggml's registry only, so that any backend build works.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace laguna {

struct BackendFree {
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
};
struct ContextFree {
    void operator()(ggml_context *context) const { ggml_free(context); }
};
struct BufferFree {
    void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};
struct SchedFree {
    void operator()(ggml_backend_sched_t sched) const { ggml_backend_sched_free(sched); }
};
using BackendPtr = std::unique_ptr<ggml_backend, BackendFree>;
using ContextPtr = std::unique_ptr<ggml_context, ContextFree>;
using BufferPtr = std::unique_ptr<ggml_backend_buffer, BufferFree>;
using SchedPtr = std::unique_ptr<ggml_backend_sched, SchedFree>;

// The device with this registry name, the CPU when the name is empty; ConfigError for a name nobody has.
ggml_backend_dev_t device_by_name(const std::string &name);

// The backends a computation runs on: the wanted device first, further devices that hold its inputs, the CPU last.
class Backends {
  public:
    Backends(ggml_backend_dev_t device, int n_threads);

    void add(ggml_backend_dev_t device);          // no effect when already there
    ggml_backend_t main() const { return main_; } // the backend of the device given to the constructor
    int n_threads() const { return n_threads_; }
    void set_n_threads(int n_threads);
    SchedPtr new_scheduler(size_t graph_size);

  private:
    void apply_threads();

    std::vector<BackendPtr> backends_; // the CPU is always the last
    ggml_backend_t main_ = nullptr;
    int n_threads_;
};

// One graph of fixed shapes: built and allocated once, then computed any number of times without an allocation.
//
// The scheduler may reuse an input's memory after its last use, so set every input before every compute.
class FixedGraph {
  public:
    // build(context, graph) creates the nodes; tensors marked as inputs or outputs keep their place.
    FixedGraph(Backends &backends, size_t max_nodes, const std::function<void(ggml_context *, ggml_cgraph *)> &build);

    void compute();
    size_t buffer_size() const;

  private:
    ContextPtr context_;
    SchedPtr sched_;
    ggml_cgraph *graph_ = nullptr;
};

// Allocates every tensor of a no_alloc context on a backend; throws when memory is short.
BufferPtr allocate_tensors(ggml_context *context, ggml_backend_t backend, const char *what);

ContextPtr new_context(size_t max_tensors);

} // namespace laguna
