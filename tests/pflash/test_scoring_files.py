"""Scoring heads and segment probes: written, bound to one drafter by its hash, refused otherwise."""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from laguna_gguf.errors import CheckpointError, ConfigError, TargetMismatchError
from laguna_gguf.inspect import inspect
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.hashing import file_sha256
from laguna_gguf.pflash.head import export_head, load_head, write_head
from laguna_gguf.pflash.probe import load_probe, write_probe
from random_drafter import TINY_QWEN35, write_drafter
from reference.pflash_numpy import ReferenceScorer
from scorer_fixtures import make_scorer, random_ids, random_probe, write_random_probe


@pytest.fixture
def drafter(tmp_path: Path, qwen35: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copy(qwen35, tmp_path / "drafter.gguf"))


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_exported_head_scores_as_no_head(tmp_path: Path, dtype: Any) -> None:
    path = write_drafter(tmp_path / "d.gguf", dtype=dtype)
    export_head(path, tmp_path / "head.gguf")
    ids = random_ids(100)
    own = make_scorer(path).score(ids, query=(90, 100)).mass
    assert np.array_equal(make_scorer(path, head=tmp_path / "head.gguf").score(ids, query=(90, 100)).mass, own)


def test_other_head_is_used(tmp_path: Path, drafter: Path) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((128, 64)).astype(np.float32), rng.standard_normal((64, 64)).astype(np.float32)
    write_head(tmp_path / "head.gguf", q, k, drafter)
    scorer = make_scorer(drafter, head=tmp_path / "head.gguf")
    ids = random_ids(100)
    expected = ReferenceScorer(drafter, tmp_path / "head.gguf").mass(scorer.trunk.taps(ids), (90, 100))
    mass = scorer.score(ids, query=(90, 100)).mass
    assert np.abs(mass - expected).max() <= 1e-5 * expected.max()
    assert np.abs(mass - make_scorer(drafter).score(ids, query=(90, 100)).mass).max() > 0.1 * mass.max()


def test_written_files_are_sound_to_inspect(tmp_path: Path, drafter: Path) -> None:
    export_head(drafter, tmp_path / "head.gguf")
    write_random_probe(tmp_path / "probe.gguf", drafter)
    for name, kind in (("head", "scoring_head"), ("probe", "segment_probe")):
        report = inspect(str(tmp_path / f"{name}.gguf"))
        assert report["kind"] == kind and report["sound"], report["problems"]


def test_probe_comes_back_as_written(tmp_path: Path, drafter: Path) -> None:
    probe = random_probe(TINY_QWEN35.n_embd)
    loaded = load_probe(write_random_probe(tmp_path / "probe.gguf", drafter, probe), DrafterFile(drafter))
    assert (loaded.min_segment, loaded.max_segment, loaded.gelu) == (4, 64, "tanh")
    assert loaded.threshold == pytest.approx(0.8) and loaded.subunit is not None and probe.subunit is not None
    assert np.array_equal(loaded.fc1_weight, probe.fc1_weight)
    assert np.array_equal(loaded.subunit.conv_weight, probe.subunit.conv_weight)


def test_files_of_another_drafter_are_refused(tmp_path: Path, drafter: Path) -> None:
    export_head(drafter, tmp_path / "head.gguf")
    write_random_probe(tmp_path / "probe.gguf", drafter)
    other = DrafterFile(write_drafter(tmp_path / "other.gguf", seed=1))
    for load, name in ((load_head, "head.gguf"), (load_probe, "probe.gguf")):
        with pytest.raises(TargetMismatchError, match="belongs to another drafter: runtime_gguf_sha256"):
            load(tmp_path / name, other)


def test_files_of_another_width_are_refused(tmp_path: Path, drafter: Path) -> None:
    export_head(drafter, tmp_path / "head.gguf")
    wide = DrafterFile(write_drafter(tmp_path / "wide.gguf", replace(TINY_QWEN35, n_embd=96)))
    with pytest.raises(TargetMismatchError, match="width 64"):
        load_head(tmp_path / "head.gguf", wide)
    with pytest.raises(TargetMismatchError, match="head rows have shapes"):
        write_head(tmp_path / "x.gguf", np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float32), drafter)
    assert not (tmp_path / "x.gguf").exists()


def test_qwen3_has_no_head_files(tmp_path: Path, drafter: Path, qwen3: Path) -> None:
    export_head(drafter, tmp_path / "head.gguf")
    with pytest.raises(TargetMismatchError, match="no pflash_scoring_head file is defined"):
        load_head(tmp_path / "head.gguf", DrafterFile(qwen3))


def test_kinds_are_not_mixed_up(tmp_path: Path, drafter: Path) -> None:
    probe = write_random_probe(tmp_path / "probe.gguf", drafter)
    file = DrafterFile(drafter)
    with pytest.raises(CheckpointError, match="architecture 'segmentprobe'; needed 'pflash_scoring_head'"):
        load_head(probe, file)
    with pytest.raises(CheckpointError, match="architecture 'qwen35'"):
        load_probe(drafter, file)
    with pytest.raises(CheckpointError, match="not found"):
        load_head(tmp_path / "absent.gguf", file)


def rewrite(source: Path, target: Path, **changes: Any) -> Path:
    """Copy a head or probe with metadata keys or tensors (names with two dots) replaced; None leaves one out."""
    reader = gguf.GGUFReader(str(source))
    arch = reader.fields["general.architecture"].contents()
    prefix = "scoringhead." if arch == "pflash_scoring_head" else "segmentprobe."
    writer = gguf.GGUFWriter(str(target), arch)
    for name, field in reader.fields.items():
        if not name.startswith(prefix):
            continue
        key = name.removeprefix(prefix)
        value = changes.get(key, field.contents())
        if value is not None:
            writer.add_key_value(name, value, field.types[0])
    for tensor in reader.tensors:
        value = changes.get(tensor.name.removeprefix(prefix), np.asarray(tensor.data))
        if value is not None:
            writer.add_tensor(tensor.name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "qwen3_5_0_8b_nope_qk_mass_v2"},
        {"base_model": "Qwen/Qwen3-0.6B"},
        {"feature_tap": "post_block13"},
        {"runtime_gguf_sha256": "12"},
        {"runtime_gguf_sha256": None},
        {"attn_q.weight": None},
        {"attn_k.weight": np.full((64, 64), np.nan, np.float32)},
        {"attn_k.weight": np.zeros((64, 64), np.float16)},
        {"attn_k.weight": np.zeros((64, 32), np.float32)},
        {"attn_q.weight": np.zeros((64, 64), np.float32)},
    ],
)
def test_heads_that_break_their_schema_are_refused(tmp_path: Path, drafter: Path, changes: dict[str, Any]) -> None:
    export_head(drafter, tmp_path / "head.gguf")
    bad = rewrite(tmp_path / "head.gguf", tmp_path / "bad.gguf", **changes)
    with pytest.raises((CheckpointError, TargetMismatchError)) as caught:
        load_head(bad, DrafterFile(drafter))
    name = next(iter(changes))
    assert name in str(caught.value) or "query and 64 key rows" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "x"},
        {"threshold": 0.0},
        {"threshold": 1.0},
        {"threshold": float("nan")},
        {"min_segment": 0},
        {"max_segment": 3},
        {"conv_taps": 4},
        {"conv_taps": 7},
        {"norm_eps": 0.0},
        {"gelu": "relu"},
        {"subunit.conv.bias": None},
        {"fc2.weight": np.zeros(7, np.float32)},
        {"fc1.weight": np.full((24, 64), np.inf, np.float32)},
    ],
)
def test_probes_that_break_their_schema_are_refused(tmp_path: Path, drafter: Path, changes: dict[str, Any]) -> None:
    write_random_probe(tmp_path / "probe.gguf", drafter)
    bad = rewrite(tmp_path / "probe.gguf", tmp_path / "bad.gguf", **changes)
    with pytest.raises(CheckpointError, match="is refused"):
        load_probe(bad, DrafterFile(drafter))


def test_second_schema_and_missing_gelu_are_accepted(tmp_path: Path, drafter: Path) -> None:
    write_random_probe(tmp_path / "probe.gguf", drafter)
    path = rewrite(tmp_path / "probe.gguf", tmp_path / "v2.gguf", schema="qwen3_5_0_8b_segment_probe_v2", gelu=None)
    assert load_probe(path, DrafterFile(drafter)).gelu == "tanh"


def test_probe_writer_checks(tmp_path: Path, drafter: Path) -> None:
    probe = random_probe(TINY_QWEN35.n_embd, taps=4)
    with pytest.raises(ConfigError, match="odd length"):
        write_probe(tmp_path / "probe.gguf", probe, drafter)
    bad = random_probe(TINY_QWEN35.n_embd)
    bad.fc1_bias[0] = np.nan
    with pytest.raises(CheckpointError, match="not finite"):
        write_probe(tmp_path / "probe.gguf", bad, drafter)
    assert not (tmp_path / "probe.gguf").exists()


def test_hash_and_its_sidecar(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"abc" * 100)
    digest = hashlib.sha256(b"abc" * 100).hexdigest()
    assert file_sha256(file) == digest
    status = file.stat()
    sidecar = tmp_path / "model.gguf.sha256"
    assert sidecar.read_text() == f"{digest}  model.gguf\n# size=300 mtime_ns={status.st_mtime_ns}\n"
    sidecar.write_text(sidecar.read_text().replace(digest, "0" * 64))
    assert file_sha256(file) == "0" * 64  # trusted while size and time match
    file.write_bytes(b"abd" * 100)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert file_sha256(file) == hashlib.sha256(b"abd" * 100).hexdigest()
    assert "abd" not in sidecar.read_text() and sidecar.read_text().startswith(file_sha256(file))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "junk",
        "{digest}  other.gguf\n# size=300 mtime_ns={time}\n",
        "{digest}  model.gguf\n# size=299 mtime_ns={time}\n",
    ],
)
def test_sidecars_that_do_not_fit_are_ignored(tmp_path: Path, text: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x" * 300)
    filled = text.format(digest="0" * 64, time=file.stat().st_mtime_ns)
    (tmp_path / "model.gguf.sha256").write_text(filled)
    assert file_sha256(file) == hashlib.sha256(b"x" * 300).hexdigest()


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    assert file_sha256(file) == hashlib.sha256(b"x").hexdigest()
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_missing_file_has_no_hash(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        file_sha256(tmp_path / "absent.gguf")
