#!/usr/bin/env python3
"""Damaged model files against everything that reads them: GGUF, config.json, safetensors, shard indices, tokenizers.

Case i of a seed is always the same input. Cases run in child processes whose address space may grow by 1 GiB. Each must
end within 5 s (of processor time on a busy machine), in success or in a LagunaError, and leave no output behind: a
signal, another exception, a hang or an allocation beyond the limit is a failure. Exit status 0: no failure. Linux only.

    tools/fuzz_gguf.py --n 20000
    tools/fuzz_gguf.py --only 1234 --keep FOLDER          write one case's files and run it in this process
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(_ROOT / "tools"), str(_ROOT / "tests")]

from fuzzing.corpus import seeds  # noqa: E402
from fuzzing.worker import BEGIN, END, FAIL, make_case, run_cases  # noqa: E402

MAX_SECONDS = 5.0
_START_SECONDS = 120.0
"""For the imports of a child on a busy machine."""
_RAM = Path("/dev/shm")


def cpu_time(pid: int) -> tuple[str, float]:
    """State letter and processor seconds of a process; ("", 0.0) once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Child:
    """A worker over a range of cases, watched from outside."""

    def __init__(self, begin: int, end: int, seed: int, folder: Path) -> None:
        arguments = ["--worker", str(begin), str(end), "--seed", str(seed), "--keep", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.stdout, selectors.EVENT_READ)
        self.buffer = b""
        self.current = begin - 1
        """The case that has begun last."""
        self.slowest = (0.0, begin)
        """Longest wait for a line, and the case that it was for."""
        self.peak = 0
        self.cpu_at_begin = 0.0
        self.failures: list[str] = []

    def watch(self) -> None:
        """Read until the child ends; a case that takes too long is killed. Afterwards `failures` is complete."""
        heard, allowed = time.monotonic(), _START_SECONDS
        while True:
            ready = self.selector.select(timeout=max(0.0, heard + allowed - time.monotonic()))
            chunk = self.stdout.read() if ready else None
            if chunk:
                now = time.monotonic()
                if allowed == MAX_SECONDS:
                    self.slowest = max(self.slowest, (now - heard, self.current))
                heard, allowed = now, MAX_SECONDS
                self._lines(chunk)
            elif ready:
                break
            elif time.monotonic() - heard >= allowed:
                if allowed == MAX_SECONDS and self._is_starved():
                    heard += 1.0  # waiting for a processor is not the case's fault
                    continue
                self.process.kill()
                self.failures.append(f"case {self.current}: not done after {allowed:.0f} s")
                break
        status = self.process.wait()
        if status < 0 and not any("not done" in text for text in self.failures):
            self.failures.append(f"case {self.current}: killed by {signal.Signals(-status).name}")
        elif status > 0:
            self.failures.append(f"case {self.current}: the child ended with status {status}")
        self.selector.close()
        self.stdout.close()

    def _is_starved(self) -> bool:
        """Whether the child wants to run and has had less processor time for this case than it may take."""
        state, seconds = cpu_time(self.process.pid)
        return state == "R" and seconds - self.cpu_at_begin < MAX_SECONDS

    def _lines(self, chunk: bytes) -> None:
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        for line in lines:
            word, number, *rest = line.decode().split(" ", 2)
            if word == BEGIN:
                self.current = int(number)
                self.cpu_at_begin = cpu_time(self.process.pid)[1]
            elif word == FAIL:
                self.failures.append(json.loads(rest[0]))
            elif word == END:
                self.peak = int(number)


def fuzz(n: int, seed: int, begin: int = 0) -> dict[str, Any]:
    """Run cases begin .. begin+n-1; returns counts, failures, the slowest wait and the peak resident size."""
    report: dict[str, Any] = {"n": n, "seed": seed, "failures": [], "slowest": (0.0, begin), "peak_rss": 0}
    started, next_case, end = time.monotonic(), begin, begin + n
    with tempfile.TemporaryDirectory(dir=_RAM if _RAM.is_dir() else None) as folder:
        while next_case < end:
            child_folder = Path(folder) / str(next_case)
            child_folder.mkdir()
            child = Child(next_case, end, seed, child_folder)
            child.watch()
            report["failures"] += child.failures
            report["slowest"] = max(report["slowest"], child.slowest)
            report["peak_rss"] = max(report["peak_rss"], child.peak)
            if child.process.returncode != 0 and child.current < next_case:
                break  # it cannot even start
            next_case = end if child.process.returncode == 0 else child.current + 1
    return report | {"seconds": time.monotonic() - started}


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2000, help="number of cases (default 2000)")
    parser.add_argument("--begin", type=int, default=0, help="first case (default 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="CASE", help="one case, in this process")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where --only leaves its files")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        run_cases(range(*arguments.worker), arguments.seed, arguments.keep)
        return 0
    if arguments.only is not None:
        return only(arguments.only, arguments.seed, arguments.keep)
    report = fuzz(arguments.n, arguments.seed, arguments.begin)
    if arguments.json:
        print(json.dumps(report))
    else:
        for failure in report["failures"]:
            print(failure)
        seconds, case = report["slowest"]
        print(
            f"{report['n']} cases of seed {report['seed']} in {report['seconds']:.0f} s, slowest {seconds:.2f} s (case "
            f"{case}), peak resident {report['peak_rss'] / 2**20:.0f} MiB, {len(report['failures'])} failures"
        )
    return 1 if report["failures"] else 0


def only(index: int, seed: int, keep: Path | None) -> int:
    """Write a case's files and run it; failures are printed by the worker."""
    with tempfile.TemporaryDirectory() as folder:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            source, outtype = make_case(index, seed, seeds(), keep)
            print(f"case {index}: {source.name}, conversion to {outtype}, files in {keep}")
        run_cases(range(index, index + 1), seed, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
