"""Where a model is: local paths, Hugging Face caches and `hf://` sources, all resolved to a local file or directory.

    hf://org/name                    a checkpoint directory (config.json), or the only GGUF file of the repository
    hf://org/name/file.gguf          one file (of a split GGUF: with its other shards)
    hf://org/name@revision[/file]    a branch, tag, commit, or refs/pr/<n>
    .../models--org--name            a repository in a cache, at refs/main; also a snapshot in it

Only `hf://` uses the network, through huggingface_hub (extra `hub`) with its cache, login and offline mode.
"""

import re
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from laguna_gguf.errors import CheckpointError, ConfigError
from laguna_gguf.paths import path_argument

# One slash is enough: pathlib makes "hf:/" of "hf://".
_SCHEME = re.compile(r"hf:/{1,2}(?!/)")
_REVISION_WITH_SLASHES = re.compile(r"refs/[^/]+/[^/]+")
_SHARD = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)")
_MAX_SHARDS = 1000
_CONFIG = "config.json"
_REPOSITORY_PREFIX = "models--"

_DIRECTORY_FILES = ["*.json", "*.safetensors", "*.jinja"]
"""What a checkpoint directory is made of; other formats of the same weights stay where they are."""
_NOT_MODELS = ("datasets", "spaces", "buckets")


class HubSource(NamedTuple):
    """A parsed `hf://` source. file: path inside the repository, None for the whole; revision None: the main branch."""

    repo: str
    revision: str | None
    file: str | None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.repo}{revision}{f'/{self.file}' if self.file else ''}"


def is_hub_source(source: str | PathLike[str]) -> bool:
    """Whether a source is an `hf://` one (also after a trip through pathlib)."""
    return _SCHEME.match(_text(source)) is not None


def parse_source(source: str | PathLike[str]) -> HubSource:
    """Take an `hf://` source apart; ConfigError when it has not the form hf://org/name[@revision][/file]."""
    text = _text(source)
    rest = _SCHEME.sub("", text, count=1)
    org, _, rest = rest.partition("/")
    name, slash, file = rest.partition("/")
    name, at, revision = name.partition("@")
    whole = f"{revision}{slash}{file}"
    if at and (match := _REVISION_WITH_SLASHES.match(whole)):
        revision, file = match.group(), whole[match.end() :].removeprefix("/")
    parts = file.split("/") if file else []
    malformed = not org or not name or (at and not revision) or (slash and whole.endswith("/"))
    if malformed or org in _NOT_MODELS or any(part in ("", ".", "..") for part in parts) or "\0" in text:
        raise ConfigError(f"source: found {text!r}, needed hf://org/name[@revision][/file] of a model repository")
    return HubSource(f"{org}/{name}", unquote(revision) or None, file or None)


def resolve(source: str | PathLike[str]) -> Path:
    """The local path of a source, downloaded first when it is an `hf://` one that is not in the cache.

    A path that is not a repository folder of a cache is returned as it is, whether it exists or not. Raises ConfigError
    for a malformed source or without huggingface_hub, CheckpointError when the files cannot be had: no network, no such
    repository, revision or file, no access, or nothing to load in it.
    """
    if is_hub_source(source):
        return _download(parse_source(source))
    path = Path(path_argument("source", source))
    try:
        if _is_repository(path) and (path / "snapshots").is_dir():
            return _content(_snapshot(path), str(path))
        if path.parent.name == "snapshots" and _is_repository(path.parent.parent) and path.is_dir():
            return _content(path, str(path))
        return path
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{str(path)!r}: cannot be read ({error})") from error


def _text(source: str | PathLike[str]) -> str:
    text = path_argument("source", source)
    return text.replace("\\", "/") if text.startswith("hf:") else text


def model_name(path: Path) -> str:
    """A name for the model at a resolved path: of the repository for a snapshot (whose folder is named by its hash)."""
    folder = path if path.is_dir() else path.parent
    if path == folder and folder.parent.name == "snapshots" and _is_repository(folder.parent.parent):
        return folder.parent.parent.name.rpartition("--")[2]
    return path.name if path == folder else path.stem


# Cache folders


def _is_repository(path: Path) -> bool:
    return path.name.startswith(_REPOSITORY_PREFIX)


def _snapshot(repository: Path) -> Path:
    """The snapshot that refs/main names, or the only one."""
    reference = repository / "refs" / "main"
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8").strip()
        snapshot = repository / "snapshots" / commit
        if not re.fullmatch(r"[0-9A-Za-z._-]+", commit) or commit in (".", "..") or not snapshot.is_dir():
            raise CheckpointError(f"{repository}: refs/main names the snapshot {commit[:80]!r}, which is not there")
        return snapshot
    snapshots = sorted(path for path in (repository / "snapshots").iterdir() if path.is_dir())
    if len(snapshots) != 1:
        names = ", ".join(path.name for path in snapshots[:8]) or "none"
        raise CheckpointError(f"{repository}: no refs/main; give one of its snapshots: found {names}")
    return snapshots[0]


def _content(snapshot: Path, source: str) -> Path:
    """A snapshot with config.json as it is, else its only GGUF file."""
    if (snapshot / _CONFIG).is_file():
        return snapshot
    return snapshot / _only_gguf([path.name for path in snapshot.iterdir()], source)


def _only_gguf(files: list[str], source: str) -> str:
    found = sorted(name for name in files if name.endswith(".gguf"))
    first_shards = [name for name in found if not (match := _SHARD.fullmatch(name)) or int(match[2]) == 1]
    if len(first_shards) != 1:
        names = f"found {len(first_shards)}: {', '.join(first_shards[:8])}" if first_shards else "found none"
        raise CheckpointError(f"{source}: no {_CONFIG}; needed that or the name of a GGUF file, {names}")
    return first_shards[0]


# Downloads


def _download(source: HubSource) -> Path:
    hub = _library(source)
    try:
        if source.file is not None:
            return _download_file(hub, source, source.file)
        snapshot = Path(
            hub.snapshot_download(
                source.repo,
                revision=source.revision,
                allow_patterns=_DIRECTORY_FILES,
                ignore_patterns=["*/*"],
            )
        )
        if (snapshot / _CONFIG).is_file():
            return snapshot
        return _download_file(hub, source, _only_gguf(_files(hub, source, snapshot), str(source)))
    except CheckpointError:
        raise
    except Exception as error:  # what its HTTP library raises differs from release to release
        raise _explained(source, error) from error


def _files(hub: Any, source: HubSource, snapshot: Path) -> list[str]:
    """Files of a repository; without network those that an earlier download left in the cache."""
    try:
        return list(hub.HfApi().list_repo_files(source.repo, revision=source.revision))
    except Exception:
        cached = [path.name for path in snapshot.glob("*.gguf")]
        if not cached:
            raise
        return cached


def _download_file(hub: Any, source: HubSource, file: str) -> Path:
    """The local path of a file; the other shards of a split GGUF are put beside it."""
    shard = _SHARD.fullmatch(file)
    files = [file]
    if shard and 1 <= int(shard[4]) <= _MAX_SHARDS:
        files = [f"{shard[1]}{i:05d}{shard[3]}{shard[4]}{shard[5]}" for i in range(1, int(shard[4]) + 1)]
        files = [file, *(other for other in files if other != file)]
    paths = [Path(hub.hf_hub_download(source.repo, name, revision=source.revision)) for name in files]
    return paths[0]


def _library(source: HubSource) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise ConfigError(
            f"{source}: needs the package huggingface_hub ({error}): pip install 'laguna-gguf[hub]', or download the "
            "files and give their folder"
        ) from error
    return huggingface_hub


def _explained(source: HubSource, error: Exception) -> CheckpointError | ConfigError:
    """What a user can do about an error of huggingface_hub."""
    from huggingface_hub import errors as e

    if isinstance(error, e.HFValidationError):
        return ConfigError(f"{source}: not a repository name ({error})")
    if isinstance(error, e.GatedRepoError):
        reason = (
            f"access is restricted: accept its conditions at https://huggingface.co/{source.repo} and log in (hf auth "
            "login, or HF_TOKEN)"
        )
    elif isinstance(error, e.RepositoryNotFoundError):
        reason = "no such repository, or a private one: check the name, and log in for private ones (hf auth login)"
    elif isinstance(error, e.RevisionNotFoundError):
        reason = f"no revision {source.revision!r} in this repository"
    elif isinstance(error, (e.LocalEntryNotFoundError, ConnectionError, TimeoutError)) or _is_network_error(error):
        reason = (
            "not in the cache, and the Hub cannot be reached: connect, or download on another machine (hf download "
            f"{source.repo}) and give the folder"
        )
    elif isinstance(error, e.EntryNotFoundError):
        reason = f"no file {source.file!r} in this repository"
    elif isinstance(error, e.HfHubHTTPError):
        reason = "the Hub refused"
    else:
        reason = "cannot be downloaded"
    detail = " ".join(str(error).split())
    return CheckpointError(f"{source}: {reason} [{type(error).__name__}: {detail[:200]}]")


def _is_network_error(error: Exception) -> bool:
    """By name: requests, httpx and its successors each have classes of their own for this."""
    names = " ".join(cls.__name__ for cls in type(error).__mro__)
    return any(part in names for part in ("Connect", "Timeout", "Network", "Transport", "Proxy"))
