// pybind11 module laguna_gguf._native: conversions and exception mapping only.
#include "gguf/bindings.h"
#include "capture/hidden_capture.h"
#include "dflash/drafter.h"
#include "error.h"
#include "pflash/bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <ggml.h>

#include <map>
#include <string>

#ifndef _WIN32
#include <dlfcn.h>
#endif

namespace py = pybind11;
using laguna::Drafter;
using laguna::DrafterConfig;
using laguna::Error;
using laguna::ErrorKind;
using laguna::HiddenCapture;

namespace {

// C-contiguous float32; nothing is converted silently, a wrong dtype is the caller's mistake.
using Floats = py::array_t<float, py::array::c_style>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;

const char *python_class(ErrorKind kind) {
    switch (kind) {
    case ErrorKind::config:
        return "ConfigError";
    case ErrorKind::checkpoint:
        return "CheckpointError";
    case ErrorKind::target_mismatch:
        return "TargetMismatchError";
    case ErrorKind::capture:
        return "CaptureError";
    case ErrorKind::rollback:
        return "RollbackError";
    case ErrorKind::memory:
        return "OutOfMemoryError";
    case ErrorKind::scorer:
        return "ScorerError";
    }
    return "LagunaError";
}

void translate(std::exception_ptr pointer) {
    try {
        if (pointer) {
            std::rethrow_exception(pointer);
        }
    } catch (const Error &error) {
        const py::object type = py::module_::import("laguna_gguf.errors").attr(python_class(error.kind));
        py::set_error(type, error.what());
    }
}

std::string ggml_library_path() {
#ifndef _WIN32
    Dl_info info = {};
    if (dladdr(reinterpret_cast<const void *>(&ggml_type_name), &info) != 0 && info.dli_fname != nullptr) {
        return info.dli_fname;
    }
#endif
    return "";
}

DrafterConfig to_config(const py::dict &fields) {
    const auto get = [&](const char *name) { return fields[name]; };
    DrafterConfig config;
    config.n_embd = get("hidden_size").cast<int64_t>();
    config.n_ff = get("intermediate_size").cast<int64_t>();
    config.n_layer = get("num_hidden_layers").cast<int64_t>();
    config.n_head = get("num_attention_heads").cast<int64_t>();
    config.n_head_kv = get("num_key_value_heads").cast<int64_t>();
    config.head_dim = get("head_dim").cast<int64_t>();
    config.n_vocab = get("vocab_size").cast<int64_t>();
    config.window = get("sliding_window").cast<int64_t>();
    config.block_size = get("block_size").cast<int64_t>();
    config.mask_token_id = get("mask_token_id").cast<int64_t>();
    config.norm_eps = get("rms_norm_eps").cast<float>();
    config.rope_theta = get("rope_theta").cast<float>();
    config.target_layers = get("target_layer_ids").cast<std::vector<int>>();
    return config;
}

using PyTensor = std::tuple<int, std::vector<int64_t>, Bytes>;

std::unique_ptr<Drafter> make_drafter(const py::dict &config, const std::map<std::string, PyTensor> &tensors,
                                      int n_threads, const std::string &device) {
    laguna::TensorSources sources;
    for (const auto &[name, tensor] : tensors) {
        const auto &[type, ne, bytes] = tensor;
        sources[name] = {static_cast<ggml_type>(type), ne, bytes.data(), static_cast<size_t>(bytes.nbytes())};
    }
    return std::make_unique<Drafter>(to_config(config), sources, n_threads, device);
}

void append(Drafter &drafter, const Floats &features, int64_t start_position) {
    const DrafterConfig &config = drafter.config();
    if (features.ndim() != 3 || features.shape(1) != config.n_captured() || features.shape(2) != config.n_embd) {
        std::string found = "[";
        for (py::ssize_t i = 0; i < features.ndim(); ++i) {
            found += (i ? ", " : "") + std::to_string(features.shape(i));
        }
        throw Error(ErrorKind::config, "features have shape " + found + "]; needed [n_rows, " +
                                           std::to_string(config.n_captured()) + ", " + std::to_string(config.n_embd) +
                                           "]");
    }
    const float *data = features.data();
    const int64_t n_rows = features.shape(0);
    py::gil_scoped_release release;
    drafter.append(data, n_rows, start_position);
}

void append_captured(Drafter &drafter, const HiddenCapture &capture, int64_t first_row, int64_t n_rows,
                     int64_t start_position, bool deferred) {
    const int64_t available = capture.n_rows();
    if (first_row < 0 || n_rows < 0 || first_row > available || n_rows > available - first_row) {
        throw Error(ErrorKind::capture, "rows " + std::to_string(first_row) + ".." +
                                            std::to_string(first_row + n_rows) + " wanted; " +
                                            std::to_string(available) + " were captured");
    }
    if (static_cast<int64_t>(capture.n_layers()) != drafter.config().n_captured() ||
        capture.n_embd() != drafter.config().n_embd) {
        throw Error(ErrorKind::target_mismatch, "the capture's layers or width are not the drafter's");
    }
    const int64_t row_size = static_cast<int64_t>(capture.n_layers()) * capture.n_embd();
    py::gil_scoped_release release;
    const float *rows = capture.rows() + first_row * row_size;
    if (deferred) {
        drafter.defer(rows, n_rows, start_position);
    } else {
        drafter.append(rows, n_rows, start_position);
    }
}

py::tuple draft(Drafter &drafter, int32_t anchor, int64_t n, bool anchored, bool return_logits) {
    // n is checked before anything of its size is allocated
    const bool sane = n >= 1 && n < drafter.config().block_size;
    py::array_t<int32_t> tokens(sane ? n : 0);
    py::object logits = py::none();
    float *logits_data = nullptr;
    if (return_logits && sane) {
        py::array_t<float> array({n, drafter.config().n_vocab});
        logits_data = array.mutable_data();
        logits = std::move(array);
    }
    int32_t *tokens_data = tokens.mutable_data();
    {
        py::gil_scoped_release release;
        drafter.draft(anchor, n, anchored, tokens_data, logits_data);
    }
    return py::make_tuple(tokens, logits);
}

void bind_drafter(py::module_ &m) {
    py::class_<Drafter>(m, "Drafter")
        .def(py::init(&make_drafter), py::arg("config"), py::arg("tensors"), py::arg("n_threads"),
             py::arg("device") = "")
        .def_property("n_threads", &Drafter::n_threads, &Drafter::set_n_threads)
        .def_property_readonly("position", [](const Drafter &self) { return self.position(); })
        .def_property_readonly("first_position", [](const Drafter &self) { return self.first_position(); })
        .def_property_readonly("n_rows", [](const Drafter &self) { return self.n_rows(); })
        .def_property_readonly("has_target", &Drafter::has_target)
        .def_readwrite("argmax_on_device", &Drafter::argmax_on_device)
        .def(
            "bind_target",
            [](Drafter &self, uintptr_t model) { self.bind_target(reinterpret_cast<const llama_model *>(model)); },
            py::arg("llama_model"))
        .def("unbind_target", &Drafter::unbind_target)
        .def(
            "limit_vocabulary",
            [](Drafter &self, std::vector<int32_t> ids, int type, const Bytes &rows) {
                self.limit_vocabulary(std::move(ids), static_cast<ggml_type>(type), rows.data(),
                                      static_cast<size_t>(rows.nbytes()));
            },
            py::arg("ids"), py::arg("ggml_type"), py::arg("rows").noconvert())
        .def("append", &append, py::arg("features").noconvert(), py::arg("start_position"))
        .def("append_captured", &append_captured, py::arg("capture"), py::arg("first_row"), py::arg("n_rows"),
             py::arg("start_position"), py::arg("deferred") = false)
        .def(
            "flush", [](Drafter &self) { self.flush(); }, py::call_guard<py::gil_scoped_release>())
        .def("draft", &draft, py::arg("anchor"), py::arg("n"), py::arg("anchored") = false,
             py::arg("return_logits") = false)
        .def("rollback", &Drafter::rollback, py::arg("position"))
        .def("reset", &Drafter::reset)
        .def("memory", [](const Drafter &self) {
            return std::map<std::string, size_t>{{"weights", self.weights_bytes()},
                                                 {"context_cache", self.cache_bytes()},
                                                 {"compute", self.compute_bytes()}};
        });
}

void bind_capture(py::module_ &m) {
    py::class_<HiddenCapture>(m, "HiddenCapture")
        .def(py::init<std::vector<int>, int64_t>(), py::arg("layers"), py::arg("n_embd"))
        .def_property_readonly(
            "callback_address",
            [](const HiddenCapture &) { return reinterpret_cast<uintptr_t>(&HiddenCapture::callback); })
        .def_property_readonly("user_data_address",
                               [](const HiddenCapture &self) { return reinterpret_cast<uintptr_t>(&self); })
        .def_readwrite("enabled", &HiddenCapture::enabled)
        .def_readwrite("stop_after_last", &HiddenCapture::stop_after_last)
        .def_readwrite("one_graph", &HiddenCapture::one_graph)
        .def_readonly("n_nonfinite", &HiddenCapture::n_nonfinite)
        .def_readonly("ms", &HiddenCapture::ms)
        .def("begin", &HiddenCapture::begin)
        .def("n_rows", &HiddenCapture::n_rows)
        .def("rows", [](const HiddenCapture &self) {
            py::array_t<float> rows({self.n_rows(), static_cast<int64_t>(self.n_layers()), self.n_embd()});
            std::copy(self.rows(), self.rows() + rows.size(), rows.mutable_data());
            return rows;
        });
}

} // namespace

PYBIND11_MODULE(_native, m) {
    py::register_exception_translator(&translate);
    m.attr("LLAMA_CPP_PYTHON_VERSION") = LLAMA_CPP_PYTHON_VERSION;
    m.def("ggml_library_path", &ggml_library_path);
    m.def(
        "output_device",
        [](uintptr_t model) { return laguna::output_device_name(reinterpret_cast<const llama_model *>(model)); },
        py::arg("llama_model"));
    laguna::bind_gguf(m);
    bind_capture(m);
    bind_drafter(m);
    laguna::bind_pflash(m);
}
