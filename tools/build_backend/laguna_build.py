"""PEP 517 backend: scikit-build-core, plus one decision about llama-cpp-python.

The extension is compiled against the headers and libraries that an installed llama-cpp-python ships. pip builds
in an isolated environment, where the llama-cpp-python of the user's environment is invisible to imports although
the interpreter is the same. If a suitable one is installed there (perhaps a CUDA or Metal build that took an hour),
it is used as it is; only otherwise does it become a build requirement. It is never compiled twice.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from scikit_build_core import build as _backend
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

VERSION = "0.3.36"
"""The llama-cpp-python release whose ggml headers and ABI the extension is written for (also in pyproject.toml)."""


def _installed() -> Path | None:
    """Directory of a suitable llama_cpp in the environment that pip installs into, or None."""
    site = Path(sysconfig.get_path("platlib"))
    suitable = (site / f"llama_cpp_python-{VERSION}.dist-info").is_dir()
    suitable = suitable and (site / "llama_cpp" / "lib").is_dir() and (site / "include" / "ggml.h").is_file()
    return site / "llama_cpp" if suitable else None


def _requires(base: list[str]) -> list[str]:
    return base if _installed() else [*base, f"llama-cpp-python=={VERSION}"]


def _settings(config_settings: dict[str, Any] | None) -> dict[str, Any]:
    settings = dict(config_settings or {})
    found = _installed()
    if found is None:
        spec = importlib.util.find_spec("llama_cpp")  # finds it without loading libllama
        if spec is None or spec.origin is None:
            raise RuntimeError(f"llama-cpp-python=={VERSION} is needed to build; install it, or build with isolation")
        found = Path(spec.origin).parent
    settings.setdefault("cmake.define.LLAMA_CPP_DIR", str(found))
    settings.setdefault("cmake.define.LLAMA_CPP_PYTHON_VERSION", VERSION)
    return settings


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _requires(_backend.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _requires(_backend.get_requires_for_build_editable(config_settings))


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    return _backend.build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    return _backend.build_editable(wheel_directory, _settings(config_settings), metadata_directory)
