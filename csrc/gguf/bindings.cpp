#include "gguf/bindings.h"

#include "error.h"
#include "gguf/file.h"
#include "gguf/mapped_file.h"
#include "gguf/types.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cstring>
#include <memory>

namespace py = pybind11;

namespace laguna {

namespace {

using FilePtr = std::shared_ptr<File>;

/// A tensor together with the file whose mapping holds its bytes.
struct BoundTensor {
    FilePtr file;
    const TensorInfo *info;
};

/// Strings of a file need not be UTF-8; surrogateescape keeps every byte, so that a copy of a key is exact.
py::str to_str(std::string_view text) {
    PyObject *decoded = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
    if (decoded == nullptr) {
        throw py::error_already_set();
    }
    return py::reinterpret_steal<py::str>(decoded);
}

/// The inverse of to_str. Text that no file can hold (lone surrogates of another kind) raises UnicodeEncodeError.
std::string to_bytes(const py::str &text) {
    PyObject *encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogateescape");
    if (encoded == nullptr) {
        throw py::error_already_set();
    }
    return py::reinterpret_steal<py::bytes>(encoded);
}

/// A str or os.PathLike as a path; a null byte in it is an error of ours, not a TypeError.
std::filesystem::path to_path(const py::object &path) {
    const py::object text = py::module_::import("os").attr("fspath")(path);
    if (text.contains(py::isinstance<py::bytes>(text) ? py::object(py::bytes("\0", 1))
                                                      : py::object(py::str("\0", 1)))) {
        throw Error(ErrorKind::checkpoint, "path " + py::repr(text).cast<std::string>() + " has a null byte");
    }
    return text.cast<std::filesystem::path>();
}

py::dtype dtype_of(ValueType type) {
    switch (type) {
    case ValueType::u8:
        return py::dtype::of<uint8_t>();
    case ValueType::i8:
        return py::dtype::of<int8_t>();
    case ValueType::u16:
        return py::dtype::of<uint16_t>();
    case ValueType::i16:
        return py::dtype::of<int16_t>();
    case ValueType::u32:
        return py::dtype::of<uint32_t>();
    case ValueType::i32:
        return py::dtype::of<int32_t>();
    case ValueType::f32:
        return py::dtype::of<float>();
    case ValueType::boolean:
        return py::dtype::of<bool>();
    case ValueType::u64:
        return py::dtype::of<uint64_t>();
    case ValueType::i64:
        return py::dtype::of<int64_t>();
    case ValueType::f64:
        return py::dtype::of<double>();
    case ValueType::string:
    case ValueType::array:
        break;
    }
    throw Error(ErrorKind::checkpoint, "array element type without a numpy type");
}

py::object to_python(const ArrayValue &array) {
    if (array.element == ValueType::string) {
        py::list strings(array.strings.size());
        for (size_t i = 0; i < array.strings.size(); ++i) {
            strings[i] = to_str(array.strings[i]);
        }
        return strings;
    }
    const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(array.length)};
    py::array result(dtype_of(array.element), shape);
    if (array.length > 0) {
        std::memcpy(result.mutable_data(), array.data, static_cast<size_t>(array.length) * value_size(array.element));
    }
    return result;
}

struct ValueToPython {
    py::object operator()(uint64_t value) const { return py::int_(value); }
    py::object operator()(int64_t value) const { return py::int_(value); }
    py::object operator()(double value) const { return py::float_(value); }
    py::object operator()(bool value) const { return py::bool_(value); }
    py::object operator()(std::string_view value) const { return to_str(value); }
    py::object operator()(const ArrayValue &value) const { return to_python(value); }
};

py::array_t<uint8_t> tensor_bytes(const BoundTensor &tensor) {
    // The capsule owns a share of the file: the view keeps the mapping alive after file and tensor are gone.
    auto owner = std::make_unique<FilePtr>(tensor.file);
    py::capsule keeper(owner.get(), [](void *pointer) { delete static_cast<FilePtr *>(pointer); });
    owner.release();
    py::array_t<uint8_t> view({static_cast<py::ssize_t>(tensor.info->n_bytes)}, {py::ssize_t(1)}, tensor.info->data,
                              keeper);
    view.attr("setflags")(py::arg("write") = false);
    return view;
}

py::tuple shape_of(const BoundTensor &tensor) {
    py::tuple shape(static_cast<size_t>(tensor.info->n_dims));
    for (int dim = 0; dim < tensor.info->n_dims; ++dim) {
        shape[static_cast<size_t>(dim)] = tensor.info->ne[dim];
    }
    return shape;
}

using FloatRows = py::array_t<float, py::array::c_style | py::array::forcecast>;
using ByteRows = py::array_t<uint8_t, py::array::c_style>;

py::array_t<uint8_t> quantize(const FloatRows &rows, int type) {
    if (rows.ndim() != 2) {
        throw Error(ErrorKind::config, "rows to quantise need shape [n_rows, n_per_row], found " +
                                           std::to_string(rows.ndim()) + " dimensions");
    }
    const int64_t n_rows = rows.shape(0);
    const int64_t n_per_row = rows.shape(1);
    py::array_t<uint8_t> out({n_rows, static_cast<int64_t>(row_bytes(type, n_per_row))});
    const float *source = rows.data();
    uint8_t *target = out.mutable_data();
    py::gil_scoped_release release;
    quantize_rows(source, n_rows, n_per_row, type, target);
    return out;
}

/// Number of rows in a flat byte array; throws when it is not a whole number.
int64_t count_rows(const ByteRows &data, int type, int64_t n_per_row) {
    const size_t bytes = row_bytes(type, n_per_row);
    const auto size = static_cast<size_t>(data.size());
    if (size % bytes != 0) {
        throw Error(ErrorKind::config,
                    std::to_string(size) + " bytes, needed a multiple of a row's " + std::to_string(bytes));
    }
    return static_cast<int64_t>(size / bytes);
}

py::array_t<float> dequantize(const ByteRows &data, int type, int64_t n_per_row) {
    const int64_t n_rows = count_rows(data, type, n_per_row);
    py::array_t<float> out({n_rows, n_per_row});
    const uint8_t *source = data.data();
    float *target = out.mutable_data();
    py::gil_scoped_release release;
    dequantize_rows(source, n_rows, n_per_row, type, target);
    return out;
}

bool all_finite(const ByteRows &data, int type, int64_t n_per_row) {
    const int64_t n_rows = count_rows(data, type, n_per_row);
    const uint8_t *source = data.data();
    py::gil_scoped_release release;
    return rows_are_finite(source, n_rows, n_per_row, type);
}

} // namespace

void bind_gguf(py::module_ &m) {
    m.def("type_name", &type_name, py::arg("ggml_type"));
    m.def("type_size", &type_size, py::arg("ggml_type"));
    m.def("quantize", &quantize, py::arg("rows"), py::arg("ggml_type"));
    m.def("dequantize", &dequantize, py::arg("data"), py::arg("ggml_type"), py::arg("n_per_row"));
    m.def("all_finite", &all_finite, py::arg("data"), py::arg("ggml_type"), py::arg("n_per_row"));

    py::class_<BoundTensor>(m, "GgufTensor")
        .def_property_readonly("name", [](const BoundTensor &tensor) { return to_str(tensor.info->name); })
        .def_property_readonly("ggml_type", [](const BoundTensor &tensor) { return tensor.info->type; })
        .def_property_readonly("ne", &shape_of)
        .def_property_readonly("n_bytes", [](const BoundTensor &tensor) { return tensor.info->n_bytes; })
        .def("data", &tensor_bytes);

    py::class_<File, FilePtr>(m, "GgufFile")
        .def(py::init([](const py::object &path) {
                 const std::filesystem::path native_path = to_path(path);
                 py::gil_scoped_release release;
                 return std::make_shared<File>(native_path);
             }),
             py::arg("path"))
        .def_property_readonly("paths",
                               [](const File &file) {
                                   py::list paths;
                                   for (const auto &path : file.paths()) {
                                       paths.append(py::str(py::cast(path))); // pathlib.Path decodes as the system does
                                   }
                                   return paths;
                               })
        .def_property_readonly("version", &File::version)
        .def_property_readonly("alignment", &File::alignment)
        .def("keys",
             [](const File &file) {
                 py::list keys;
                 for (const auto &entry : file.metadata()) {
                     keys.append(to_str(entry.first));
                 }
                 return keys;
             })
        .def(
            "get",
            [](const File &file, const py::str &key, py::object fallback) {
                const Value *value = file.find(to_bytes(key));
                return value == nullptr ? fallback : std::visit(ValueToPython{}, value->data);
            },
            py::arg("key"), py::arg("default") = py::none())
        .def("tensors",
             [](const FilePtr &file) {
                 py::list tensors;
                 for (const TensorInfo &info : file->tensors()) {
                     tensors.append(BoundTensor{file, &info});
                 }
                 return tensors;
             })
        .def(
            "tensor",
            [](const FilePtr &file, const py::str &name) -> py::object {
                const TensorInfo *info = file->tensor(to_bytes(name));
                return info == nullptr ? py::none() : py::cast(BoundTensor{file, info});
            },
            py::arg("name"));
}

} // namespace laguna
