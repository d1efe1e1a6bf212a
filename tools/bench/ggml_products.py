"""A plain ggml graph of matrix products and nothing else: the floor under anything that needs those products.

Written with ctypes on the ggml that llama_cpp has loaded; it shares no code with the package.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
F32 = 0  # GGML_TYPE_F32


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _library(name: str) -> ctypes.CDLL:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None, "llama-cpp-python is not installed"
    suffix = {"darwin": f"lib{name}.dylib", "win32": f"{name}.dll"}.get(sys.platform, f"lib{name}.so")
    return ctypes.CDLL(str(Path(spec.origin).parent / "lib" / suffix))


class _Ggml:
    """The few functions needed, with their types."""

    def __init__(self) -> None:
        base, registry = _library("ggml-base"), _library("ggml")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        table = {
            "ggml_init": (base, pointer, [_InitParams]),
            "ggml_tensor_overhead": (base, size, []),
            "ggml_graph_overhead": (base, size, []),
            "ggml_new_graph": (base, pointer, [pointer]),
            "ggml_new_tensor_2d": (base, pointer, [pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
            "ggml_mul_mat": (base, pointer, [pointer, pointer, pointer]),
            "ggml_build_forward_expand": (base, None, [pointer, pointer]),
            "ggml_backend_alloc_ctx_tensors": (base, pointer, [pointer, pointer]),
            "ggml_backend_graph_compute": (base, ctypes.c_int, [pointer, pointer]),
            "ggml_backend_tensor_set": (base, None, [pointer, pointer, size, size]),
            "ggml_backend_dev_init": (base, pointer, [pointer, ctypes.c_char_p]),
            "ggml_backend_dev_backend_reg": (base, pointer, [pointer]),
            "ggml_backend_reg_get_proc_address": (base, pointer, [pointer, ctypes.c_char_p]),
            "ggml_backend_dev_by_type": (registry, pointer, [ctypes.c_int]),
        }
        for name, (library, result, arguments) in table.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


class MatrixProducts:
    """Products weight @ x for a list of weights, every x with its own number of rows, computed again and again."""

    def __init__(
        self, weights: list[tuple[int, tuple[int, int], NDArray[np.uint8]]], rows: list[int], n_threads: int
    ) -> None:
        """weights: (ggml type, (n_in, n_out), raw bytes); rows: rows of x by weight."""
        g = self._ggml = _Ggml()
        n = len(weights)
        overhead = g.ggml_tensor_overhead() * (3 * n + 8) + g.ggml_graph_overhead()
        context = g.ggml_init(_InitParams(overhead, None, True))
        device = g.ggml_backend_dev_by_type(CPU)
        self._backend = g.ggml_backend_dev_init(device, None)
        set_threads = g.ggml_backend_reg_get_proc_address(
            g.ggml_backend_dev_backend_reg(device), b"ggml_backend_set_n_threads"
        )
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(set_threads)(self._backend, n_threads)
        self._graph = g.ggml_new_graph(context)
        filled = []
        rng = np.random.default_rng(0)
        for (ggml_type, (n_in, n_out), data), n_rows in zip(weights, rows, strict=True):
            weight = g.ggml_new_tensor_2d(context, ggml_type, n_in, n_out)
            x = g.ggml_new_tensor_2d(context, F32, n_in, n_rows)
            g.ggml_build_forward_expand(self._graph, g.ggml_mul_mat(context, weight, x))
            filled += [(weight, data), (x, rng.standard_normal((n_rows, n_in)).astype(np.float32))]
        if not g.ggml_backend_alloc_ctx_tensors(context, self._backend):
            raise MemoryError("no memory for the floor's tensors")
        for tensor, array in filled:
            g.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)

    def run(self) -> float:
        """Compute all products once; ms."""
        began = perf_counter()
        status = self._ggml.ggml_backend_graph_compute(self._backend, self._graph)
        assert status == 0, f"graph failed with status {status}"
        return (perf_counter() - began) * 1e3
