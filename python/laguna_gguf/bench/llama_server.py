"""Runs llama-server of the `xllamacpp` package until its standard input ends. It is started by path.

xllamacpp has its own llama.cpp inside; in a process of its own it can neither meet the other copy nor end the
benchmark.
argv[1]: JSON with path, n_ctx, n_batch, n_ubatch, n_threads, n_gpu_layers, type_k, type_v, flash_attn, swa_full,
speculative (a type of --spec-type) and api_key. One line of JSON with address and version says that it is ready;
llama.cpp's own output goes to stderr.
"""

import json
import os
import sys


def main() -> None:
    settings = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import xllamacpp  # type: ignore[import-untyped]

    params = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    for name in ("n_ctx", "n_batch", "n_ubatch", "n_gpu_layers", "swa_full"):
        setattr(params, name, settings[name])
    params.n_parallel = 1
    params.cache_type_k = xllamacpp.ggml_type(settings["type_k"])
    params.cache_type_v = xllamacpp.ggml_type(settings["type_v"])
    params.flash_attn_type = xllamacpp.llama_flash_attn_type(1 if settings["flash_attn"] else 0)
    if settings["n_threads"]:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["n_threads"]
    kind = "COMMON_SPECULATIVE_TYPE_" + settings["speculative"].upper().replace("-", "_")
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    params.api_keys = [settings["api_key"]]
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address, "version": xllamacpp.__version__}), file=out, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
