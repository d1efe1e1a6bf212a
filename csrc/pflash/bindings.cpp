#include "pflash/bindings.h"

#include "capture/hidden_capture.h"
#include "error.h"
#include "pflash/block15.h"
#include "pflash/running_max.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

namespace py = pybind11;

namespace laguna {

namespace {

using Floats = py::array_t<float, py::array::c_style>;

std::string shape_text(const Floats &array) {
    std::string text = "[";
    for (py::ssize_t i = 0; i < array.ndim(); ++i) {
        text += (i ? ", " : "") + std::to_string(array.shape(i));
    }
    return text + "]";
}

// The data of an array of exactly this shape; -1 is any length.
const float *checked(const Floats &array, const char *name, const std::vector<int64_t> &shape) {
    bool fits = array.ndim() == static_cast<py::ssize_t>(shape.size());
    std::string needed;
    for (size_t i = 0; i < shape.size(); ++i) {
        fits = fits && (shape[i] < 0 || array.shape(static_cast<py::ssize_t>(i)) == shape[i]);
        needed += (i ? ", " : "") + (shape[i] < 0 ? std::string("n") : std::to_string(shape[i]));
    }
    if (!fits) {
        throw Error(ErrorKind::config,
                    std::string(name) + " has shape " + shape_text(array) + "; needed [" + needed + "]");
    }
    return array.data();
}

Block15Config to_config(const py::dict &fields) {
    const Block15Config config = {fields["n_embd"].cast<int64_t>(), fields["n_head"].cast<int64_t>(),
                                  fields["n_head_kv"].cast<int64_t>(), fields["head_dim"].cast<int64_t>(),
                                  fields["norm_eps"].cast<float>()};
    if (config.n_embd <= 0 || config.head_dim <= 0 || config.n_head_kv <= 0 || config.n_head <= 0 ||
        config.n_head % config.n_head_kv != 0) {
        throw Error(ErrorKind::config,
                    "the scorer needs n_embd and head_dim above 0 and n_head a multiple of n_head_kv");
    }
    return config;
}

std::unique_ptr<Block15Scorer> make_scorer(const py::dict &config_fields, const py::dict &weights,
                                           const std::optional<py::dict> &probe_fields, int n_threads,
                                           const std::string &device) {
    const Block15Config config = to_config(config_fields);
    const auto array = [](const py::dict &fields, const char *name) { return fields[name].cast<Floats>(); };
    const Floats attn_norm = array(weights, "attn_norm"), q = array(weights, "attn_q"), k = array(weights, "attn_k"),
                 q_norm = array(weights, "attn_q_norm"), k_norm = array(weights, "attn_k_norm");
    const Block15Source source = {checked(attn_norm, "attn_norm", {config.n_embd}),
                                  checked(q, "attn_q", {config.n_head * config.head_dim, config.n_embd}),
                                  checked(k, "attn_k", {config.n_head_kv * config.head_dim, config.n_embd}),
                                  checked(q_norm, "attn_q_norm", {config.head_dim}),
                                  checked(k_norm, "attn_k_norm", {config.head_dim})};
    if (!probe_fields) {
        return std::make_unique<Block15Scorer>(config, source, nullptr, n_threads, device);
    }
    const py::dict &fields = *probe_fields;
    const Floats norm_w = array(fields, "norm_weight"), norm_b = array(fields, "norm_bias"),
                 fc1_w = array(fields, "fc1_weight"), fc1_b = array(fields, "fc1_bias"),
                 fc2_w = array(fields, "fc2_weight"), fc2_b = array(fields, "fc2_bias");
    const int64_t n_hidden = fc1_b.size(), n_outputs = fc2_b.size();
    const ProbeSource probe = {n_hidden,
                               fields["norm_eps"].cast<float>(),
                               fields["gelu_erf"].cast<bool>(),
                               checked(norm_w, "norm_weight", {config.n_embd}),
                               checked(norm_b, "norm_bias", {config.n_embd}),
                               checked(fc1_w, "fc1_weight", {n_hidden, config.n_embd}),
                               checked(fc1_b, "fc1_bias", {n_hidden}),
                               n_outputs,
                               checked(fc2_w, "fc2_weight", {n_outputs, n_hidden}),
                               checked(fc2_b, "fc2_bias", {n_outputs})};
    return std::make_unique<Block15Scorer>(config, source, &probe, n_threads, device);
}

void append(Block15Scorer &scorer, const Floats &taps, TokenStore &store) {
    const float *data = checked(taps, "taps", {-1, scorer.config().n_embd});
    const int64_t n = taps.shape(0);
    py::gil_scoped_release release;
    scorer.append(data, n, store);
}

void append_captured(Block15Scorer &scorer, const HiddenCapture &capture, TokenStore &store) {
    if (capture.n_layers() != 1 || capture.n_embd() != scorer.config().n_embd) {
        throw Error(ErrorKind::config, "the scorer reads a capture of one layer of its own width");
    }
    const int64_t n = capture.n_rows();
    py::gil_scoped_release release;
    scorer.append(capture.rows(), n, store);
}

using PyWindow = std::pair<Floats, std::vector<std::pair<int64_t, int64_t>>>;

py::array_t<double> mass(Block15Scorer &scorer, const TokenStore &store, const std::vector<PyWindow> &windows) {
    std::vector<Block15Scorer::Window> native;
    for (const auto &[taps, allowed] : windows) {
        Block15Scorer::Window window = {
            checked(taps, "taps of a window", {-1, scorer.config().n_embd}), taps.shape(0), {}};
        int64_t last = 0, n_allowed = 0;
        for (const auto &[begin, end] : allowed) {
            if (begin < last || end < begin || end > store.n_tokens()) {
                throw Error(ErrorKind::config,
                            "allowed keys must be ascending ranges inside 0.." + std::to_string(store.n_tokens()));
            }
            last = end;
            n_allowed += end - begin;
            window.allowed.push_back({begin, end});
        }
        if (window.n_rows == 0 || n_allowed == 0) {
            throw Error(ErrorKind::config, "a window needs at least one row and one key that it may see");
        }
        native.push_back(std::move(window));
    }
    py::array_t<double> result({static_cast<int64_t>(native.size()), store.n_tokens()});
    double *data = result.mutable_data();
    bool sound = false;
    {
        py::gil_scoped_release release;
        sound = scorer.mass(store, native, data);
    }
    if (!sound) {
        throw Error(ErrorKind::scorer, "the scorer met values that are not finite");
    }
    return result;
}

py::array_t<float> probe_values(const TokenStore &store) {
    py::array_t<float> values({store.n_tokens(), store.n_probe_outputs});
    std::copy(store.probe.begin(), store.probe.end(), values.mutable_data());
    return values;
}

py::array_t<float> importance(const AttentionCapture &capture, int n_threads, const std::string &device) {
    py::array_t<float> result(capture.n_tokens());
    float *data = result.mutable_data();
    bool sound = false;
    {
        py::gil_scoped_release release;
        sound = running_max(capture, n_threads, device, data);
    }
    if (!sound) {
        throw Error(ErrorKind::scorer, "the all-layer scorer met values that are not finite");
    }
    return result;
}

// FNV-1a, 64 bits, over the little-endian bytes of token ids.
uint64_t fingerprint(const py::array_t<int32_t, py::array::c_style> &ids) {
    const auto *bytes = reinterpret_cast<const uint8_t *>(ids.data());
    uint64_t hash = 0xcbf29ce484222325u;
    for (py::ssize_t i = 0; i < ids.nbytes(); ++i) {
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    }
    return hash;
}

} // namespace

void bind_pflash(py::module_ &m) {
    py::class_<TokenStore>(m, "TokenStore")
        .def_property_readonly("n_tokens", &TokenStore::n_tokens)
        .def_property_readonly("n_bytes", &TokenStore::n_bytes)
        .def("truncate", &TokenStore::truncate, py::arg("n_tokens"))
        .def("probe", &probe_values)
        .def("keys", [](const TokenStore &self) {
            py::array_t<float> keys({self.n_tokens(), self.keys.n_head_kv(), self.keys.head_dim()});
            self.keys.copy(keys.mutable_data());
            return keys;
        });
    py::class_<Block15Scorer>(m, "Block15Scorer")
        .def(py::init(&make_scorer), py::arg("config"), py::arg("weights"), py::arg("probe"), py::arg("n_threads"),
             py::arg("device") = "")
        .def("new_store", &Block15Scorer::new_store)
        .def("append", &append, py::arg("taps").noconvert(), py::arg("store"))
        .def("append_captured", &append_captured, py::arg("capture"), py::arg("store"))
        .def("mass", &mass, py::arg("store"), py::arg("windows"))
        .def("memory", [](const Block15Scorer &self) {
            return std::map<std::string, size_t>{{"weights", self.weights_bytes()}, {"compute", self.compute_bytes()}};
        });
    py::class_<AttentionCapture>(m, "AttentionCapture")
        .def(py::init([](std::vector<int> layers, int64_t n_head, int64_t n_head_kv, int64_t head_dim, bool rotated) {
                 return std::make_unique<AttentionCapture>(std::move(layers),
                                                           AttentionShape{n_head, n_head_kv, head_dim}, rotated);
             }),
             py::arg("layers"), py::arg("n_head"), py::arg("n_head_kv"), py::arg("head_dim"), py::arg("rotated"))
        .def_property_readonly(
            "callback_address",
            [](const AttentionCapture &) { return reinterpret_cast<uintptr_t>(&AttentionCapture::callback); })
        .def_property_readonly("user_data_address",
                               [](const AttentionCapture &self) { return reinterpret_cast<uintptr_t>(&self); })
        .def_readwrite("enabled", &AttentionCapture::enabled)
        .def("begin", &AttentionCapture::begin, py::arg("query_begin"), py::arg("query_end"))
        .def("next_batch", &AttentionCapture::next_batch)
        .def_property_readonly("n_bytes", &AttentionCapture::n_bytes);
    m.def("fingerprint", &fingerprint, py::arg("ids").noconvert());
    m.def("running_max", &importance, py::arg("capture"), py::arg("n_threads"), py::arg("device") = "");
}

} // namespace laguna
