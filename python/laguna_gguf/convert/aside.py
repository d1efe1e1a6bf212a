"""Output that is either complete or not there: written under another name in the same folder, then renamed."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from laguna_gguf.errors import CheckpointError, ConfigError


def check_outfile(outfile: Path, *, directory: bool = False) -> None:
    """ConfigError unless a file (or a new directory) can be created under this name."""
    if "\0" in str(outfile):
        raise ConfigError(f"outfile: {str(outfile)!r} is not a path (null byte)")
    try:
        if directory and (outfile.exists() or outfile.is_symlink()):
            raise ConfigError(f"outfile: {outfile} exists, needed the name of a new directory")
        if outfile.is_dir():
            raise ConfigError(f"outfile: {outfile} is a directory, needed a file name")
        if outfile.exists() and not outfile.is_file():  # a rename would replace the device or pipe itself
            raise ConfigError(f"outfile: {outfile} is a device or pipe, needed a file name")
        if not outfile.parent.is_dir():
            raise ConfigError(f"outfile: the directory {outfile.parent} does not exist")
    except OSError as error:
        raise ConfigError(f"outfile: {outfile} is not a usable path ({error})") from error


@contextlib.contextmanager
def written_aside(outfile: Path, *, directory: bool = False) -> Iterator[Path]:
    """A temporary path beside `outfile` to write to; it takes that name when the block ends without an error.

    On any error nothing new is left and an earlier file is untouched. The caller flushes what it writes to disk.
    OSError and text that no file can hold become CheckpointError.
    """
    check_outfile(outfile, directory=directory)
    temporary = outfile.with_name(f".{outfile.name}.{secrets.token_hex(4)}.part")
    try:
        if directory:
            temporary.mkdir()
        yield temporary
        if directory:
            sync_directory(temporary)
            os.rename(temporary, outfile)  # refused when something with content has appeared there meanwhile
        else:
            os.replace(temporary, outfile)
        sync_directory(outfile.parent)
    except (OSError, UnicodeEncodeError) as error:  # a tokenizer.json can hold text that is not Unicode
        raise CheckpointError(f"{outfile}: cannot be written ({error})") from error
    finally:
        if directory:
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make new names in a directory durable."""
    if os.name == "nt":  # directories cannot be opened there
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
