"""SHA-256 of a drafter, by which heads and probes are bound to it, with a cache beside the file."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
from pathlib import Path

from laguna_gguf.errors import CheckpointError

logger = logging.getLogger(__name__)

_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n# size=([0-9]+) mtime_ns=(-?[0-9]+)\n?")
_MAX_SIDECAR = 8192


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a whole file.

    It is read from `<file>.sha256` (line 1 as sha256sum writes it, line 2 `# size=<bytes> mtime_ns=<n>`) when size and
    time still match, and written there after hashing where the folder allows it. CheckpointError when the file cannot
    be read.
    """
    file = Path(path)
    sidecar = file.with_name(file.name + ".sha256")
    try:
        status = file.stat()
        cached = _cached(sidecar, file.name, status)
        if cached is not None:
            return cached
        with file.open("rb") as stream:
            digest = (
                hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _hash(stream)
            )
        unchanged = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if (unchanged.st_size, unchanged.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
        _store(sidecar, f"{digest}  {file.name}\n# size={status.st_size} mtime_ns={status.st_mtime_ns}\n")
    return digest


def _hash(stream: object) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):  # type: ignore[attr-defined]
        digest.update(block)
    return digest.hexdigest()


def _cached(sidecar: Path, name: str, status: os.stat_result) -> str | None:
    try:
        with sidecar.open("rb") as stream:
            text = stream.read(_MAX_SIDECAR).decode("utf-8", "surrogateescape")
    except OSError:
        return None
    found = _LINE.fullmatch(text)
    if found is None or found[2] != name:
        return None
    return found[1] if (int(found[3]), int(found[4])) == (status.st_size, status.st_mtime_ns) else None


def _store(sidecar: Path, text: str) -> None:
    temporary = sidecar.with_name(f".{sidecar.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(text.encode("utf-8", "surrogateescape"))
        os.replace(temporary, sidecar)
    except OSError as error:  # a read-only folder: the next load hashes again
        logger.debug("hash not cached: %s", error)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
