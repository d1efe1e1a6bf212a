#include "ggml/backend.h"

#include "error.h"

#include <ggml-alloc.h>

namespace laguna {

ggml_backend_dev_t device_by_name(const std::string &name) {
    if (ggml_backend_dev_count() == 0) {
        ggml_backend_load_all(); // builds with dynamic backends; llama_backend_init usually did it
    }
    ggml_backend_dev_t device =
        name.empty() ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : ggml_backend_dev_by_name(name.c_str());
    if (device == nullptr) {
        throw Error(ErrorKind::config,
                    "no device '" + (name.empty() ? std::string("CPU") : name) + "' in ggml's registry");
    }
    return device;
}

Backends::Backends(ggml_backend_dev_t device, int n_threads) : n_threads_(n_threads) {
    add(device);
    add(device_by_name("")); // the scheduler wants the CPU as the last resort
}

void Backends::add(ggml_backend_dev_t device) {
    for (const BackendPtr &backend : backends_) {
        if (ggml_backend_get_device(backend.get()) == device) {
            return;
        }
    }
    BackendPtr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw Error(ErrorKind::memory,
                    std::string("device ") + ggml_backend_dev_name(device) + " cannot be initialised");
    }
    const auto is_cpu = [](const BackendPtr &other) {
        return ggml_backend_dev_type(ggml_backend_get_device(other.get())) == GGML_BACKEND_DEVICE_TYPE_CPU;
    };
    const bool before_cpu = !backends_.empty() && is_cpu(backends_.back());
    main_ = main_ == nullptr ? backend.get() : main_;
    backends_.insert(before_cpu ? backends_.end() - 1 : backends_.end(), std::move(backend));
    apply_threads();
}

void Backends::set_n_threads(int n_threads) {
    n_threads_ = n_threads;
    apply_threads();
}

void Backends::apply_threads() {
    for (const BackendPtr &backend : backends_) {
        ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend.get()));
        auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
        if (set != nullptr) {
            set(backend.get(), n_threads_);
        }
    }
}

SchedPtr Backends::new_scheduler(size_t graph_size) {
    std::vector<ggml_backend_t> list;
    for (const BackendPtr &backend : backends_) {
        list.push_back(backend.get());
    }
    SchedPtr sched(ggml_backend_sched_new(list.data(), nullptr, static_cast<int>(list.size()), graph_size,
                                          /*parallel=*/false, /*op_offload=*/false));
    if (!sched) {
        throw Error(ErrorKind::memory, "no memory for a graph scheduler");
    }
    return sched;
}

FixedGraph::FixedGraph(Backends &backends, size_t max_nodes,
                       const std::function<void(ggml_context *, ggml_cgraph *)> &build) {
    const ggml_init_params params = {
        /*.mem_size   =*/ggml_tensor_overhead() * max_nodes + ggml_graph_overhead_custom(max_nodes, false),
        /*.mem_buffer =*/nullptr,
        /*.no_alloc   =*/true,
    };
    context_.reset(ggml_init(params));
    if (!context_) {
        throw Error(ErrorKind::memory, "no memory for a graph");
    }
    graph_ = ggml_new_graph_custom(context_.get(), max_nodes, false);
    build(context_.get(), graph_);
    sched_ = backends.new_scheduler(max_nodes);
    if (!ggml_backend_sched_alloc_graph(sched_.get(), graph_)) {
        throw Error(ErrorKind::memory, "no memory for the compute buffers of a drafter graph");
    }
}

void FixedGraph::compute() {
    const ggml_status status = ggml_backend_sched_graph_compute(sched_.get(), graph_);
    if (status != GGML_STATUS_SUCCESS) {
        throw Error(ErrorKind::memory, std::string("drafter graph failed: ") + ggml_status_to_string(status));
    }
}

size_t FixedGraph::buffer_size() const {
    size_t total = 0;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched_.get()); ++i) {
        total += ggml_backend_sched_get_buffer_size(sched_.get(), ggml_backend_sched_get_backend(sched_.get(), i));
    }
    return total;
}

BufferPtr allocate_tensors(ggml_context *context, ggml_backend_t backend, const char *what) {
    BufferPtr buffer(ggml_backend_alloc_ctx_tensors(context, backend));
    if (!buffer) {
        throw Error(ErrorKind::memory, std::string("no memory for ") + what + " on device " +
                                           ggml_backend_dev_name(ggml_backend_get_device(backend)));
    }
    return buffer;
}

ContextPtr new_context(size_t max_tensors) {
    const ggml_init_params params = {ggml_tensor_overhead() * max_tensors, nullptr, true};
    ContextPtr context(ggml_init(params));
    if (!context) {
        throw Error(ErrorKind::memory, "no memory for tensor headers");
    }
    return context;
}

} // namespace laguna
