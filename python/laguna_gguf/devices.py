"""The devices that ggml knows (CPU, GPUs, accelerators) and their memory.

llama_cpp's own bindings end before ggml's backend registry, so this module reads it through cffi in ABI mode, from the
very libggml that llama_cpp runs: the registry of a second copy would describe another, unused, set of backends.
"""

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cffi import FFI

from laguna_gguf.errors import LagunaError

# From ggml-backend.h of ggml 0.25.3 (llama-cpp-python 0.3.36). Enum ggml_backend_dev_type is passed as int.
_DECLARATIONS = """
typedef struct ggml_backend_device * ggml_backend_dev_t;

size_t             ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
const char *       ggml_backend_dev_name(ggml_backend_dev_t device);
const char *       ggml_backend_dev_description(ggml_backend_dev_t device);
void               ggml_backend_dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total);
int                ggml_backend_dev_type(ggml_backend_dev_t device);
const char *       ggml_version(void);
const char *       ggml_commit(void);
"""

KINDS = ("cpu", "gpu", "igpu", "accel", "meta")
"""Names of enum ggml_backend_dev_type, by value. "meta" wraps several devices for tensor parallelism."""


@dataclass(frozen=True)
class Device:
    """One entry of ggml's device registry. Memory in bytes; both 0 when the device has none of its own to report."""

    name: str
    description: str
    kind: str
    free: int
    total: int


def list_devices() -> tuple[Device, ...]:
    """All devices of the running ggml, in registry order, with their memory as of now.

    Raises LagunaError when llama-cpp-python or its ggml cannot be found.
    """
    ffi, registry, base = _libraries()
    devices = []
    for index in range(registry.ggml_backend_dev_count()):
        device = registry.ggml_backend_dev_get(index)
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        base.ggml_backend_dev_memory(device, free, total)
        kind = KINDS[base.ggml_backend_dev_type(device)]
        n_free = int(free[0])
        if kind == "cpu":
            # ggml reports all of the machine's memory as free.
            n_free = min(n_free, host_memory_free() or n_free)
        devices.append(
            Device(
                name=_text(ffi, base.ggml_backend_dev_name(device)),
                description=_text(ffi, base.ggml_backend_dev_description(device)),
                kind=kind,
                free=n_free,
                total=int(total[0]),
            )
        )
    return tuple(devices)


def ggml_build() -> tuple[str, str]:
    """(version, commit) of the running ggml."""
    ffi, _, base = _libraries()
    return _text(ffi, base.ggml_version()), _text(ffi, base.ggml_commit())


def host_memory_free(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of main memory a new process can use without swapping; None where unknown (outside Linux).

    Reclaimable page cache counts as free; the limit of the enclosing control group (a container's) is respected.
    """
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text("ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text("ascii"))
        used = int((cgroup / "memory.current").read_text("ascii"))
        stat = dict(line.split(maxsplit=1) for line in (cgroup / "memory.stat").read_text("ascii").splitlines())
        used -= int(stat.get("inactive_file", 0))
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        return free
    return max(0, min(free, limit - used))


@lru_cache(maxsize=1)
def _libraries() -> tuple[FFI, Any, Any]:
    """(ffi, libggml with the registry, libggml-base with the device functions)."""
    ffi = FFI()
    ffi.cdef(_DECLARATIONS)
    directory = _library_dir()
    # libggml before libggml-base: it brings the base that it needs itself.
    return ffi, _open(ffi, directory, "ggml"), _open(ffi, directory, "ggml-base")


def _library_dir() -> Path:
    # find_spec, because importing llama_cpp is not needed to know where it is.
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise LagunaError("llama-cpp-python is not installed; install it with: pip install llama-cpp-python==0.3.36")
    return Path(spec.origin).parent / "lib"


def _open(ffi: FFI, directory: Path, name: str) -> Any:
    candidates = _candidates(directory, name)
    if not candidates:
        raise LagunaError(f"no {name} library in {directory}; reinstall llama-cpp-python==0.3.36")
    # A wheel holds libggml.so and libggml.so.0 as two files, and the loader takes two files for two libraries. The one
    # that is already in the process is the right one; NOLOAD finds it without ever mapping another.
    no_load = getattr(ffi, "RTLD_NOLOAD", None)
    if no_load is not None:
        for path in candidates:
            try:
                return ffi.dlopen(str(path), ffi.RTLD_NOW | no_load)
            except OSError:
                continue
    try:
        return ffi.dlopen(str(candidates[0]), ffi.RTLD_NOW)
    except OSError as error:
        raise LagunaError(f"cannot load {candidates[0]}: {error}") from error


def _candidates(directory: Path, name: str) -> list[Path]:
    """Files of library `name`, the one other libraries ask for by its soname (libggml.so.0) first."""
    if sys.platform == "win32":
        patterns = [f"{name}.dll", f"lib{name}.dll"]
    elif sys.platform == "darwin":
        patterns = [f"lib{name}.[0-9]*.dylib", f"lib{name}.dylib", f"lib{name}.so"]
    else:
        patterns = [f"lib{name}.so.[0-9]*", f"lib{name}.so"]
    found = []
    for pattern in patterns:
        found += sorted(directory.glob(pattern), key=lambda path: (len(path.name), path.name))
    return found


def _text(ffi: FFI, pointer: Any) -> str:
    return "" if pointer == ffi.NULL else os.fsdecode(ffi.string(pointer))
