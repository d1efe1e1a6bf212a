"""ggml's device list and the memory plan."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures import write_drafter_dir
from laguna_gguf import convert_dflash, load_drafter
from laguna_gguf._native import GgufFile
from laguna_gguf.devices import KINDS, Device, host_memory_free, list_devices
from laguna_gguf.errors import CheckpointError, LagunaError
from laguna_gguf.memory_plan import GGML_TYPE_F32, MemoryPlan, PlanItem, plan_memory, trained_context
from tiny_models import TINY_TARGET

MIB = 2**20
CPU = Device("CPU", "a processor", "cpu", 64 * MIB, 128 * MIB)
N_FULL, N_SLIDING = 2, 6  # of TINY_TARGET's 8 layers
KV_WIDTH = TINY_TARGET.n_head_kv * TINY_TARGET.head_dim


def bytes_of(plan: MemoryPlan, part: str) -> int:
    return sum(item.n_bytes for item in plan.items if item.part == part)


def test_devices_include_the_cpu() -> None:
    devices = list_devices()
    assert all(device.name and device.kind in KINDS for device in devices)
    (cpu,) = [device for device in devices if device.kind == "cpu"]
    assert 0 < cpu.free <= cpu.total


@pytest.mark.parametrize("modules", ["llama_cpp, laguna_gguf.devices", "laguna_gguf.devices, llama_cpp"])
def test_one_copy_of_each_library(modules: str) -> None:
    """Listing devices maps no second libggml, whichever package is imported first."""
    code = f"""
import sys, {modules}
laguna_gguf.devices.list_devices()
llama_cpp.llama_backend_init()
if sys.platform == "linux":
    print(*{{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}}, sep="\\n")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    names = [re.sub(r"\.so.*", "", Path(path).name) for path in run.stdout.split()]
    for library in ("libggml", "libggml-base", "libllama"):
        assert names.count(library) == (1 if names else 0), run.stdout


def test_free_host_memory_respects_a_container(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    assert host_memory_free(proc, cgroup) is None
    (proc / "meminfo").write_text("MemTotal: 4000 kB\nMemFree: 100 kB\nMemAvailable: 3000 kB\n")
    assert host_memory_free(proc, cgroup) == 3000 * 1024
    (cgroup / "memory.max").write_text("max\n")
    assert host_memory_free(proc, cgroup) == 3000 * 1024
    (cgroup / "memory.max").write_text(f"{1000 * 1024}\n")
    (cgroup / "memory.current").write_text(f"{700 * 1024}\n")
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {200 * 1024}\n")
    assert host_memory_free(proc, cgroup) == 500 * 1024
    (cgroup / "memory.current").write_text(f"{1300 * 1024}\n")
    assert host_memory_free(proc, cgroup) == 0


def test_plan_of_a_target(tiny_target: Path) -> None:
    plan = plan_memory(tiny_target, n_ctx=1000, n_ubatch=64, devices=(CPU,))
    assert plan.n_ctx == 1024
    assert bytes_of(plan, "target weights") == sum(tensor.n_bytes for tensor in GgufFile(str(tiny_target)).tensors())
    # K and V in f16: the sliding cache holds window + n_ubatch = 96 rows, rounded up to 256
    assert bytes_of(plan, "target KV cache") == 2 * 2 * KV_WIDTH * (N_FULL * 1024 + N_SLIDING * 256)
    assert {item.device for item in plan.items} == {"CPU"}
    assert plan.needed() == {"CPU": sum(item.n_bytes for item in plan.items)}
    assert trained_context(tiny_target) == TINY_TARGET.n_ctx_train
    assert plan_memory(tiny_target, devices=(CPU,)).n_ctx == TINY_TARGET.n_ctx_train


@pytest.mark.parametrize("swa_full", [False, True])
@pytest.mark.parametrize("type_k", [GGML_TYPE_F32, 1])
def test_plan_equals_what_llama_cpp_allocates(tiny_target: Path, swa_full: bool, type_k: int) -> None:
    settings = {"n_ctx": 768, "n_batch": 256, "n_ubatch": 256, "type_k": type_k, "type_v": 1, "swa_full": swa_full}
    plan = plan_memory(tiny_target, **settings)  # type: ignore[arg-type]
    # In a process of its own: llama_cpp's log callback cannot decode every line that llama.cpp logs.
    code = f"import llama_cpp; llama_cpp.Llama({str(tiny_target)!r}, n_threads=1, n_threads_batch=1, **{settings})"
    log = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, errors="replace", check=True, timeout=60
    ).stderr
    caches = [float(mib) for mib in re.findall(r"KV buffer size\s*=\s*([\d.]+) MiB", log)]
    assert len(caches) == 2
    assert bytes_of(plan, "target KV cache") / MIB == pytest.approx(sum(caches), abs=0.011)
    (compute,) = [float(mib) for mib in re.findall(r"compute buffer size\s*=\s*([\d.]+) MiB", log)]
    assert bytes_of(plan, "compute") / MIB == pytest.approx(compute, rel=0.35)


def test_plan_of_a_drafter(tiny_target: Path, tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "hf")
    convert_dflash(tmp_path / "hf", tmp_path / "drafter.gguf", outtype="f32", target=tiny_target)
    for path in (tmp_path / "hf", tmp_path / "drafter.gguf"):
        plan = plan_memory(tiny_target, path, n_ctx=512, devices=(CPU,))
        memory = load_drafter(path).memory()
        assert bytes_of(plan, "drafter context") == memory["context_cache"]
        assert bytes_of(plan, "drafter weights") == pytest.approx(memory["weights"], rel=0.05)


def test_placement_on_gpus(tiny_target: Path) -> None:
    gpus = (Device("GPU0", "", "gpu", 100, 200), Device("GPU1", "", "gpu", 300, 400))
    devices = (*gpus, CPU)
    file = GgufFile(str(tiny_target))
    total = sum(tensor.n_bytes for tensor in file.tensors())
    embedding = file.tensor("token_embd.weight")
    assert embedding is not None

    def weights(n_gpu_layers: int) -> dict[str, int]:
        items = plan_memory(tiny_target, n_ctx=512, n_gpu_layers=n_gpu_layers, devices=devices).items
        return {item.device: item.n_bytes for item in items if item.part == "target weights"}

    assert weights(0) == {"CPU": total}
    everything = weights(-1)
    assert sum(everything.values()) == total
    assert everything["CPU"] == embedding.n_bytes  # the embedding stays in main memory
    assert 0 < everything["GPU0"] < everything["GPU1"]  # in proportion to their free memory
    assert weights(99) == everything
    some = weights(3)
    assert some["CPU"] > everything["CPU"] and sum(some.values()) == total


def test_shortfall_is_named() -> None:
    items = (PlanItem("a", "", "CPU", 60 * MIB), PlanItem("b", "", "CPU", 10 * MIB), PlanItem("c", "", "BLAS", 5))
    plan = MemoryPlan(items, (CPU, Device("BLAS", "", "accel", 0, 0)), 256)
    assert plan.shortfalls() == {"CPU": 6 * MIB}


def test_plan_refuses_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "text.gguf").write_text("not a model")
    for name in ("empty.gguf", "text.gguf", "missing.gguf"):
        with pytest.raises(LagunaError) as caught:
            plan_memory(tmp_path / name, devices=(CPU,))
        assert isinstance(caught.value, ValueError)


def test_plan_names_a_missing_key(tmp_path: Path, tiny_target: Path) -> None:
    data = tiny_target.read_bytes()
    path = tmp_path / "renamed.gguf"
    path.write_bytes(data.replace(b"laguna.block_count", b"laguna.block_cOunt"))
    with pytest.raises(CheckpointError, match=r"laguna\.block_count"):
        plan_memory(path, devices=(CPU,))
