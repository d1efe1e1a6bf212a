"""Sources that are no plain path: hf:// (with the library's functions replaced, no network) and cache folders."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures import drafter_config, drafter_tensors, write_drafter_dir, write_drafter_gguf
from laguna_gguf import hub
from laguna_gguf.dflash.checkpoint import is_drafter, read_checkpoint
from laguna_gguf.errors import CheckpointError, ConfigError

huggingface_hub = pytest.importorskip("huggingface_hub")
from huggingface_hub import errors as hub_errors  # noqa: E402

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_repository(root: Path, *, commit: str = COMMIT, main: bool = True) -> Path:
    """An empty repository in a cache: blobs, refs, one snapshot."""
    repository = root / "models--poolside--Laguna-DFlash"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    if main:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
    return repository


def add_files(repository: Path, files: Path | list[Path], *, commit: str = COMMIT) -> Path:
    """Store files the way huggingface_hub does: blobs by hash, relative links in the snapshot."""
    snapshot = repository / "snapshots" / commit
    for i, file in enumerate(sorted(files.iterdir()) if isinstance(files, Path) else files):
        blob = file.rename(repository / "blobs" / f"{commit[:8]}{i:056x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def gguf_files(folder: Path, *names: str) -> list[Path]:
    config = drafter_config()
    folder.mkdir(exist_ok=True)
    return [write_drafter_gguf(folder / name, drafter_tensors(config), config) for name in names]


@pytest.fixture
def directory_repository(tmp_path: Path) -> Path:
    write_drafter_dir(tmp_path / "files", layout="sharded")
    repository = cached_repository(tmp_path / "hub")
    add_files(repository, tmp_path / "files")
    return repository


# Parsing


@pytest.mark.parametrize(("text", "expected"), [
    ("hf://org/name", ("org/name", None, None)),
    ("hf:/org/name", ("org/name", None, None)),
    ("hf://org/name@v1.0", ("org/name", "v1.0", None)),
    ("hf://org/name/a.gguf", ("org/name", None, "a.gguf")),
    ("hf://org/name@main/sub/a.gguf", ("org/name", "main", "sub/a.gguf")),
    ("hf://org/name@refs/pr/3", ("org/name", "refs/pr/3", None)),
    ("hf://org/name@refs/pr/3/a.gguf", ("org/name", "refs/pr/3", "a.gguf")),
    ("hf://org/name@feature%2Fx/a.gguf", ("org/name", "feature/x", "a.gguf")),
])  # fmt: skip
def test_sources_are_parsed(text: str, expected: tuple[str, str | None, str | None]) -> None:
    assert hub.is_hub_source(text)
    assert tuple(hub.parse_source(text)) == expected
    assert tuple(hub.parse_source(Path(text))) == expected  # pathlib takes a slash away


@pytest.mark.parametrize("text", [
    "hf://", "hf://org", "hf://org/", "hf:///org/name", "hf://org/@main", "hf://org/name@", "hf://org/name@/a",
    "hf://org/name/", "hf://org/name/../x", "hf://org/name//a", "hf://org/name@v1/", "hf://datasets/org/name",
    "hf://org/name/a\0b",
])  # fmt: skip
def test_malformed_sources_are_refused(text: str) -> None:
    if text == "hf:///org/name":
        assert not hub.is_hub_source(text)  # then it is a path, and not there
        with pytest.raises(CheckpointError, match="no such file"):
            read_checkpoint(text)
        return
    with pytest.raises(ConfigError, match=r"hf://org/name\[@revision\]\[/file\]"):
        hub.resolve(text)


def test_other_paths_come_back_as_they_are(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", Path("relative/x.gguf"), Path("models--a--b")):
        assert hub.resolve(path) == path
    assert hub.resolve(str(tmp_path)) == tmp_path


# Caches


def test_a_cached_repository_is_read_at_main(directory_repository: Path) -> None:
    snapshot = directory_repository / "snapshots" / COMMIT
    other = cached_repository(directory_repository.parent, commit="f" * 40, main=False)
    assert other == directory_repository
    assert hub.resolve(directory_repository) == snapshot
    assert hub.resolve(snapshot) == snapshot
    assert len(read_checkpoint(directory_repository).tensors) == 40
    assert is_drafter(directory_repository)
    assert hub.model_name(snapshot) == "Laguna-DFlash"


def test_a_cached_repository_without_main_needs_a_single_snapshot(tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "files")
    repository = cached_repository(tmp_path / "hub", main=False)
    add_files(repository, tmp_path / "files")
    assert hub.resolve(repository) == repository / "snapshots" / COMMIT
    (repository / "snapshots" / ("a" * 40)).mkdir()
    with pytest.raises(CheckpointError, match=f"no refs/main.*{COMMIT}"):
        hub.resolve(repository)


def test_a_cached_repository_of_one_gguf_is_that_file(tmp_path: Path) -> None:
    repository = cached_repository(tmp_path / "hub")
    snapshot = add_files(repository, gguf_files(tmp_path / "files", "draft-BF16.gguf"))
    assert hub.resolve(repository) == snapshot / "draft-BF16.gguf"
    assert hub.resolve(snapshot) == snapshot / "draft-BF16.gguf"
    assert hub.model_name(snapshot / "draft-BF16.gguf") == "draft-BF16"
    assert read_checkpoint(repository).dialect == "A"
    add_files(repository, gguf_files(tmp_path / "more", "draft-F16.gguf"), commit=COMMIT)
    with pytest.raises(CheckpointError, match=r"found 2: draft-BF16\.gguf, draft-F16\.gguf"):
        hub.resolve(repository)


def test_split_files_count_once(tmp_path: Path) -> None:
    repository = cached_repository(tmp_path / "hub")
    snapshot = repository / "snapshots" / COMMIT
    for i in (1, 2, 3):
        (snapshot / f"d-{i:05d}-of-00003.gguf").touch()
    assert hub.resolve(repository).name == "d-00001-of-00003.gguf"


@pytest.mark.parametrize("reference", ["b" * 40, "../../..", "..", "", "a/b", "a\0b"])
def test_references_that_lead_nowhere_are_refused(tmp_path: Path, reference: str) -> None:
    repository = cached_repository(tmp_path)
    (repository / "refs" / "main").write_text(reference)
    with pytest.raises(CheckpointError, match="refs/main names the snapshot"):
        hub.resolve(repository)


def test_an_empty_snapshot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found none"):
        hub.resolve(cached_repository(tmp_path))


def test_a_broken_link_is_refused(directory_repository: Path) -> None:
    snapshot = directory_repository / "snapshots" / COMMIT
    (snapshot / "model-00002-of-00003.safetensors").resolve().unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        read_checkpoint(directory_repository)


# Downloads


class FakeHub:
    """Stands in for the library's functions; every call is written down."""

    def __init__(self, repository: Path) -> None:
        self.snapshot = repository / "snapshots" / COMMIT
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def snapshot_download(self, repo: str, *, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        self.calls.append(("snapshot", repo, revision))
        assert "*.safetensors" in allow_patterns and not any("gguf" in pattern for pattern in allow_patterns)
        self._check()
        return str(self.snapshot)

    def hf_hub_download(self, repo: str, name: str, *, revision: str | None) -> str:
        self.calls.append(("file", repo, name, revision))
        self._check()
        return str(self.snapshot / name)

    def list_repo_files(self, repo: str, *, revision: str | None) -> list[str]:
        self._check()
        return [path.name for path in self.snapshot.iterdir()]


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(cached_repository(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    return fake


def test_a_repository_with_a_configuration_is_a_directory(fake_hub: FakeHub, tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "files", layout="sharded")
    add_files(fake_hub.snapshot.parent.parent, tmp_path / "files")
    assert len(read_checkpoint("hf://poolside/Laguna-DFlash@v1").tensors) == 40
    assert len(read_checkpoint(Path("hf://poolside/Laguna-DFlash")).tensors) == 40
    assert fake_hub.calls == [
        ("snapshot", "poolside/Laguna-DFlash", "v1"),
        ("snapshot", "poolside/Laguna-DFlash", None),
    ]


def test_a_file_is_one_file(fake_hub: FakeHub, tmp_path: Path) -> None:
    add_files(fake_hub.snapshot.parent.parent, gguf_files(tmp_path / "files", "a.gguf", "b.gguf"))
    assert read_checkpoint("hf://org/name/b.gguf").source == fake_hub.snapshot / "b.gguf"
    assert fake_hub.calls == [("file", "org/name", "b.gguf", None)]
    with pytest.raises(CheckpointError, match=r"hf://org/name: no config\.json.*found 2: a\.gguf, b\.gguf"):
        hub.resolve("hf://org/name")


def test_a_repository_of_one_gguf_is_that_file(fake_hub: FakeHub, tmp_path: Path) -> None:
    add_files(fake_hub.snapshot.parent.parent, gguf_files(tmp_path / "files", "a.gguf"))
    assert hub.resolve("hf://org/name") == fake_hub.snapshot / "a.gguf"


def test_a_cached_gguf_is_found_without_network(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise made(hub_errors.OfflineModeIsEnabled)

    monkeypatch.setattr(fake_hub, "list_repo_files", offline)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        hub.resolve("hf://org/name")
    add_files(fake_hub.snapshot.parent.parent, gguf_files(tmp_path / "files", "a.gguf"))
    assert hub.resolve("hf://org/name") == fake_hub.snapshot / "a.gguf"


def test_all_shards_of_a_split_file_are_fetched(fake_hub: FakeHub) -> None:
    assert hub.resolve("hf://org/name@v2/q/d-00002-of-00003.gguf").name == "d-00002-of-00003.gguf"
    assert [call[2] for call in fake_hub.calls] == [f"q/d-0000{i}-of-00003.gguf" for i in (2, 1, 3)]


def made(cls: type[Exception]) -> Exception:
    """An error of the library; its own constructors want an HTTP response."""
    error = cls.__new__(cls)
    Exception.__init__(error, "text of the library")
    return error


class ConnectTimeout(Exception):
    """As HTTP libraries name it."""


@pytest.mark.parametrize(("error", "message", "kind"), [
    (lambda: made(hub_errors.GatedRepoError), r"access is restricted.*huggingface\.co/org/name", CheckpointError),
    (lambda: made(hub_errors.RepositoryNotFoundError), "no such repository", CheckpointError),
    (lambda: made(hub_errors.RevisionNotFoundError), "no revision 'v9'", CheckpointError),
    (lambda: made(hub_errors.RemoteEntryNotFoundError), r"no file 'a\.gguf'", CheckpointError),
    (lambda: made(hub_errors.LocalEntryNotFoundError), "cannot be reached", CheckpointError),
    (lambda: made(hub_errors.OfflineModeIsEnabled), "cannot be reached", CheckpointError),
    (lambda: ConnectionError("text of the library"), "cannot be reached", CheckpointError),
    (lambda: ConnectTimeout("text of the library"), "cannot be reached", CheckpointError),
    (lambda: OSError(28, "text of the library"), "cannot be downloaded", CheckpointError),
    (lambda: made(hub_errors.HfHubHTTPError), "the Hub refused", CheckpointError),
    (lambda: made(hub_errors.HFValidationError), "not a repository name", ConfigError),
])  # fmt: skip
def test_errors_say_what_to_do(
    fake_hub: FakeHub, error: Callable[[], Exception], message: str, kind: type[Exception]
) -> None:
    fake_hub.error = error()
    with pytest.raises(kind, match=f"hf://org/name@v9/a.gguf: .*{message}.*text of the library"):
        read_checkpoint("hf://org/name@v9/a.gguf")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"laguna-gguf\[hub\]"):
        read_checkpoint("hf://org/name")
    assert not is_drafter("hf://org/name")


def test_the_library_itself_says_that_it_is_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No replaced function: the real ones in offline mode, with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for source in ("hf://org/name", "hf://org/name/a.gguf"):
        with pytest.raises(CheckpointError, match=f"{source}: not in the cache, and the Hub cannot be reached"):
            hub.resolve(source)
