"""The process that reads damaged files: under a memory limit, one line on stdout for each case it begins."""

import json
import os
import re
import resource
import shutil
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing.corpus import DRAFTER_ROLE, TARGET_ROLE, Seed, seeds, target_gguf
from fuzzing.mutate import mutated
from laguna_gguf import LagunaError, convert_dflash, load_drafter
from laguna_gguf.inspect import inspect

MAX_ALLOCATION = 1 << 30
OUTTYPES = ("f32", "f16", "bf16", "q8_0", "q4_k", "hf")
BEGIN, FAIL, END = "begin", "fail", "end"


def limit_memory() -> None:
    """From here on the address space may grow by 1 GiB, and no core is written."""
    size_kb = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert size_kb is not None
    limit = int(size_kb.group(1)) * 1024 + MAX_ALLOCATION
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def make_case(index: int, seed: int, all_seeds: list[Seed], folder: Path) -> tuple[Seed, str]:
    """Write case `index` into an empty folder; returns its seed and outtype. The same numbers give the same files."""
    rng = np.random.default_rng([seed, index])
    source = all_seeds[index % len(all_seeds)]
    files = dict(source.files)
    names = sorted(files)
    victims = {names[int(rng.integers(len(names)))] for _ in range(1 if rng.random() < 0.8 else 2)}
    for name in sorted(victims):
        files[name] = mutated(name, files[name], rng)
    removable = [name for name in names if name != source.opened]
    if len(files) > 1 and rng.random() < 0.03:
        del files[removable[int(rng.integers(len(removable)))]]
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return source, OUTTYPES[int(rng.integers(len(OUTTYPES)))]


def run_case(source: Seed, outtype: str, folder: Path, helpers: dict[str, Path]) -> None:
    """Read one case in every way; anything but a typed error is an exception here."""
    opened = folder / source.opened
    report = inspect(opened)
    json.dumps(report)
    if not report["sound"] and not report["problems"]:
        raise AssertionError("not sound without a reason")
    if source.role not in (DRAFTER_ROLE, TARGET_ROLE):
        return
    if report["kind"] == "drafter" and report["sound"]:
        use_drafter(opened, report["config"])
    if source.role == DRAFTER_ROLE:
        drafter, target = opened, helpers[f"target-{source.hidden}"]
    else:
        drafter, target = helpers["drafter"], opened
    out = folder.parent / "out"
    try:
        convert_dflash(drafter, out, outtype=outtype, target=target)
    except LagunaError as error:
        if not str(error):
            raise AssertionError("an error without a message") from error
        left = [path.name for path in folder.parent.iterdir() if "out" in path.name]
        if left:
            raise AssertionError(f"a refused conversion left {left}") from error
        return
    check_shards_stayed_inside(opened)
    written = inspect(out)
    if not written["sound"]:
        raise AssertionError(f"wrote a file that is not sound: {written['problems']}")
    shutil.rmtree(out) if out.is_dir() else out.unlink()


def use_drafter(opened: Path, config: dict[str, Any]) -> None:
    """What inspect calls sound is loaded and takes context rows; too large or too extreme for that is a typed error."""
    rows = np.ones((3, len(config["target_layer_ids"]), config["hidden_size"]), np.float32)
    try:
        load_drafter(opened, n_threads=1).append_context(rows)
    except LagunaError:
        pass


def check_shards_stayed_inside(opened: Path) -> None:
    """An accepted directory has read no file outside itself."""
    index = opened / "model.safetensors.index.json"
    if opened.is_dir() and index.is_file() and not (opened / "model.safetensors").is_file():
        names = json.loads(index.read_bytes())["weight_map"].values()
        if any("/" in name or "\\" in name for name in names):
            raise AssertionError("a shard outside the directory was accepted")


def run_cases(indices: range, seed: int, folder: Path) -> None:
    """All cases of a range in `folder`, then the largest resident size in bytes."""
    all_seeds = seeds()
    drafter = next(s for s in all_seeds if s.name == "dialect-A")
    contents = {"drafter": drafter.files[drafter.opened]}
    contents |= {f"target-{hidden}": target_gguf(hidden) for hidden in {s.hidden for s in all_seeds}}
    helpers = {name: folder / f"{name}.gguf" for name in contents}
    for name, content in contents.items():
        helpers[name].write_bytes(content)
    case = folder / "case"
    limit_memory()
    for index in indices:
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir()
        print(BEGIN, index, flush=True)
        source, outtype = make_case(index, seed, all_seeds, case)
        try:
            run_case(source, outtype, case, helpers)
        except BaseException:
            what = f"case {index} ({source.name}, {outtype}): {traceback.format_exc()}"
            print(FAIL, index, json.dumps(what), flush=True)
            for path in folder.glob("*out*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    print(END, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, os.getpid(), flush=True)
