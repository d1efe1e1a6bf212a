"""Checks that the native half runs on the ggml it was compiled against: a foreign one would read wrong memory."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType

from laguna_gguf.errors import LagunaError


class InstallationError(LagunaError, ImportError):
    """The installed llama-cpp-python is not the one this package was built for."""


def check_installation() -> ModuleType:
    """The native half. Raises InstallationError, saying what to install, when versions or libraries do not fit."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise InstallationError("llama-cpp-python is not installed; run: pip install llama-cpp-python==0.3.36")
    # First llama_cpp, then the native half: llama_cpp opens libllama.so by file name, the native half asks for the
    # library's soname and gets the copy that is loaded. The other way round there would be two.
    import llama_cpp  # noqa: F401

    try:
        _native = importlib.import_module("laguna_gguf._native")
    except ImportError as error:
        raise InstallationError(
            f"the native half cannot be loaded ({error}); run: pip install --force-reinstall --no-deps laguna-gguf"
        ) from error
    found = importlib.metadata.version("llama-cpp-python")
    needed = _native.LLAMA_CPP_PYTHON_VERSION
    if found != needed:
        raise InstallationError(
            f"llama-cpp-python {found} is installed, but laguna_gguf was built for {needed}: "
            f"run `pip install llama-cpp-python=={needed}` or reinstall laguna_gguf"
        )
    library = _native.ggml_library_path()
    expected = Path(spec.origin).parent / "lib"
    if library and not Path(library).resolve().is_relative_to(expected.resolve()):
        raise InstallationError(
            f"ggml was loaded from {library}, not from {expected}: another package ships the same library and was "
            "imported first; import laguna_gguf before it, or keep the two in separate environments"
        )
    return _native
