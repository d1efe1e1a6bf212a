"""Files of prompt compression: scoring heads and segment probes, held to their schemas."""

import math
import re
from typing import Any

import numpy as np

from laguna_gguf import _native

HEAD = "pflash_scoring_head"
PROBE = "segmentprobe"
KINDS = {HEAD: "scoring_head", PROBE: "segment_probe"}
"""general.architecture -> what `inspect` calls it."""

BASE_MODEL = "Qwen/Qwen3.5-0.8B"
FEATURE_TAP = "post_block14_residual_before_block15"
_PREFIXES = {HEAD: "scoringhead", PROBE: "segmentprobe"}
_SCHEMAS = {
    HEAD: ("qwen3_5_0_8b_nope_qk_mass_v1",),
    PROBE: ("qwen3_5_0_8b_segment_probe_v1", "qwen3_5_0_8b_segment_probe_v2"),
}
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_SUBUNIT = ("subunit.fc2.weight", "subunit.fc2.bias", "subunit.conv.weight", "subunit.conv.bias")


class _Checker:
    """Reads keys and tensors under one prefix and collects what is wrong."""

    def __init__(self, file: _native.GgufFile, arch: str, report: dict[str, Any]) -> None:
        self.file, self.prefix = file, _PREFIXES[arch]
        self.problems: list[str] = report["problems"]
        self.config: dict[str, Any] = report["config"]
        self.known: set[str] = set()

    def text(self, key: str, *accepted: str) -> None:
        found = self.config[key] = self.file.get(f"{self.prefix}.{key}")
        if found not in accepted:
            self.reject(key, found, " or ".join(map(repr, accepted)))

    def reject(self, key: str, found: Any, needed: str) -> None:
        self.problems.append(f"{self.prefix}.{key}: found {found!r}, needed {needed}")

    def number(self, key: str, low: float, high: float) -> None:
        found = self.config[key] = self.file.get(f"{self.prefix}.{key}")
        if not isinstance(found, float) or not low < found < high:
            self.reject(key, found, f"a number between {low} and {high}")

    def count(self, key: str, low: int) -> int:
        found = self.config[key] = self.file.get(f"{self.prefix}.{key}")
        if isinstance(found, bool) or not isinstance(found, int) or found < low:
            self.reject(key, found, f"a whole number >= {low}")
            return low
        return found

    def tensor(self, name: str, n_dims: int) -> tuple[int, ...] | None:
        """Shape (ggml order) of an f32 tensor with finite values, or None after noting what is wrong."""
        self.known.add(f"{self.prefix}.{name}")
        found = self.file.tensor(f"{self.prefix}.{name}")
        if found is None:
            self.reject(name, None, "a tensor of this name")
            return None
        if _native.type_name(found.ggml_type) != "f32" or len(found.ne) != n_dims:
            shown = f"{_native.type_name(found.ggml_type)} {list(found.ne)}"
            self.reject(name, shown, f"f32 with {n_dims} dimension{'s' if n_dims > 1 else ''}")
            return None
        if not np.isfinite(found.data().view("<f4")).all():
            self.reject(name, "values that are not finite", "finite values")
        return found.ne

    def shape(self, name: str, found: tuple[int, ...] | None, needed: tuple[int, ...]) -> None:
        if found is not None and found != needed:
            self.reject(name, list(found), f"shape {list(needed)} (ggml order)")

    def unknown(self) -> None:
        for tensor in self.file.tensors():
            if tensor.name not in self.known:
                self.problems.append(f"tensor {tensor.name}: unknown, needed none beside those of the schema")


def inspect_scoring_file(file: _native.GgufFile, arch: str, report: dict[str, Any]) -> None:
    """Fill config and problems of a scoring head or a segment probe. The drafter's file is not at hand to be hashed."""
    check = _Checker(file, arch, report)
    check.text("schema", *_SCHEMAS[arch])
    check.text("base_model", BASE_MODEL)
    check.text("feature_tap", FEATURE_TAP)
    digest = report["config"]["runtime_gguf_sha256"] = file.get(f"{check.prefix}.runtime_gguf_sha256")
    if not isinstance(digest, str) or _SHA256.fullmatch(digest) is None:
        check.reject("runtime_gguf_sha256", digest, "64 hexadecimal digits")
    if arch == HEAD:
        _check_head(check)
    else:
        _check_probe(check)
    check.unknown()
    report["config"]["parameters"] = sum(math.prod(t.ne) for t in file.tensors())


def _check_head(check: _Checker) -> None:
    q, k = check.tensor("attn_q.weight", 2), check.tensor("attn_k.weight", 2)
    if q is None or k is None:
        return
    check.config |= {"n_embd": q[0], "query_rows": q[1], "key_rows": k[1]}
    check.shape("attn_k.weight", k[:1], q[:1])
    if q[1] % k[1] != 0:
        check.reject("attn_q.weight", list(q), f"rows that are a multiple of attn_k's {k[1]}")


def _check_probe(check: _Checker) -> None:
    check.number("threshold", 0.0, 1.0)
    check.number("norm_eps", 0.0, math.inf)
    low = check.count("min_segment", 1)
    check.count("max_segment", low)
    taps = check.count("conv_taps", 1)
    if taps % 2 == 0:
        check.reject("conv_taps", taps, "an odd number")
    gelu = check.file.get("segmentprobe.gelu")
    if gelu not in (None, "tanh", "erf"):
        check.reject("gelu", gelu, "'tanh' or 'erf'")
    check.config["gelu"] = gelu or "tanh"
    norm, fc1 = check.tensor("norm.weight", 1), check.tensor("fc1.weight", 2)
    if norm is not None and fc1 is not None:
        check.config |= {"n_embd": norm[0], "n_hidden": fc1[1]}
        check.shape("fc1.weight", fc1, (norm[0], fc1[1]))
        check.shape("norm.bias", check.tensor("norm.bias", 1), norm)
        check.shape("fc1.bias", check.tensor("fc1.bias", 1), fc1[1:])
    hidden = fc1[1:] if fc1 is not None else None
    _check_output(check, "", hidden, taps)
    found = [name for name in _SUBUNIT if check.file.tensor(f"{check.prefix}.{name}") is not None]
    check.config["subunit"] = bool(found)
    if found:
        _check_output(check, "subunit.", hidden, taps)


def _check_output(check: _Checker, part: str, hidden: tuple[int, ...] | None, taps: int) -> None:
    if hidden is not None:
        check.shape(f"{part}fc2.weight", check.tensor(f"{part}fc2.weight", 1), hidden)
    check.shape(f"{part}fc2.bias", check.tensor(f"{part}fc2.bias", 1), (1,))
    check.shape(f"{part}conv.weight", check.tensor(f"{part}conv.weight", 1), (taps,))
    check.shape(f"{part}conv.bias", check.tensor(f"{part}conv.bias", 1), (1,))
