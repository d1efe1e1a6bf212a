#include "dflash/target.h"

#include "error.h"
#include "ggml/backend.h"

#include <llama.h>

#include <cstring>

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace laguna {

namespace {

using GetTensor = ggml_tensor *(*)(const llama_model *, const char *);

// llama.h has no accessor for weights, but libllama exports llama_model::get_tensor(char const *) const.
GetTensor find_get_tensor() {
#ifdef _WIN32
    HMODULE module = GetModuleHandleA("llama.dll");
    return module == nullptr ? nullptr
                             : reinterpret_cast<GetTensor>(reinterpret_cast<void *>(
                                   GetProcAddress(module, "?get_tensor@llama_model@@QEBAPEAUggml_tensor@@PEBD@Z")));
#else
    Dl_info info = {};
    if (dladdr(reinterpret_cast<const void *>(&llama_model_n_embd), &info) == 0) {
        return nullptr;
    }
    void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD); // the copy that llama_cpp already loaded
    if (library == nullptr) {
        return nullptr;
    }
    void *symbol = dlsym(library, "_ZNK11llama_model10get_tensorEPKc");
    dlclose(library); // only drops our count: llama_cpp keeps it loaded
    return reinterpret_cast<GetTensor>(symbol);
#endif
}

ggml_tensor *lookup(const llama_model *model, const char *name) {
    static const GetTensor get_tensor = find_get_tensor();
    if (get_tensor == nullptr) {
        throw Error(ErrorKind::target_mismatch,
                    "this libllama does not export llama_model::get_tensor; install the llama-cpp-python release that "
                    "laguna_gguf was built for");
    }
    ggml_tensor *tensor = get_tensor(model, name);
    return tensor != nullptr && tensor->buffer != nullptr ? tensor : nullptr;
}

ggml_tensor *output_head(const llama_model *model) {
    ggml_tensor *output = lookup(model, "output.weight");
    return output != nullptr ? output : lookup(model, "token_embd.weight"); // tied embeddings
}

void require_shape(const ggml_tensor *tensor, const char *name, int64_t n_embd, int64_t n_vocab) {
    if (tensor == nullptr) {
        throw Error(ErrorKind::target_mismatch, std::string("the target has no tensor ") + name + " in memory");
    }
    if (tensor->ne[0] != n_embd || tensor->ne[1] != n_vocab) {
        throw Error(ErrorKind::target_mismatch, std::string("the target's ") + name + " is [" +
                                                    std::to_string(tensor->ne[0]) + ", " +
                                                    std::to_string(tensor->ne[1]) + "]; the drafter needs [" +
                                                    std::to_string(n_embd) + ", " + std::to_string(n_vocab) + "]");
    }
}

ggml_backend_dev_t device_of(const ggml_tensor *tensor) {
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
    return device != nullptr ? device : device_by_name("");
}

} // namespace

TargetTensors::TargetTensors(const llama_model *model, int64_t n_embd, int64_t n_vocab)
    : embeddings_(lookup(model, "token_embd.weight")), output_(output_head(model)) {
    require_shape(embeddings_, "token_embd.weight", n_embd, n_vocab);
    require_shape(output_, "output.weight", n_embd, n_vocab);
    const std::string buffer_type = ggml_backend_buft_name(ggml_backend_buffer_get_type(embeddings_->buffer));
    const bool readable =
        ggml_backend_buffer_is_host(embeddings_->buffer) || device_of(embeddings_) != device_by_name("");
    if (!readable || buffer_type.find("REPACK") != std::string::npos ||
        (embeddings_->type != GGML_TYPE_F32 && ggml_get_type_traits(embeddings_->type)->to_float == nullptr)) {
        throw Error(ErrorKind::target_mismatch, "rows of the target's token_embd.weight (" +
                                                    std::string(ggml_type_name(embeddings_->type)) + " in " +
                                                    buffer_type + ") cannot be read; load it as another type");
    }
    bytes_.resize(ggml_row_size(embeddings_->type, n_embd));
}

ggml_backend_dev_t TargetTensors::output_device() const { return device_of(output_); }

void TargetTensors::embed(int32_t token, float *row) {
    const size_t n_embd = static_cast<size_t>(embeddings_->ne[0]);
    ggml_backend_tensor_get(embeddings_, bytes_.data(), static_cast<size_t>(token) * embeddings_->nb[1], bytes_.size());
    if (embeddings_->type == GGML_TYPE_F32) {
        std::memcpy(row, bytes_.data(), n_embd * sizeof(float));
    } else {
        ggml_get_type_traits(embeddings_->type)->to_float(bytes_.data(), row, static_cast<int64_t>(n_embd));
    }
}

std::string output_device_name(const llama_model *model) {
    const ggml_tensor *output = output_head(model);
    return output == nullptr ? std::string() : ggml_backend_dev_name(device_of(output));
}

} // namespace laguna
