"""Text from outside reaches llama.cpp's tokenizer without ending the process."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laguna_gguf import PFlash
from laguna_gguf.cli import main
from laguna_gguf.errors import ConfigError
from laguna_gguf.llama_text import tokenizable
from laguna_gguf.pflash.target_tokens import token_counter
from session_tools import spec_session

BEYOND = b"\xf4\x90\x80\x80"
"""The code point U+110000, one too many."""


def test_only_code_points_beyond_unicode_are_replaced() -> None:
    mark = "\ufffd".encode()
    for bad in (BEYOND, b"\xf4\xbf\xbf\xbf", b"\xf5\x80\x80\x80", b"\xf7\xbf\xbf\xbf"):
        assert tokenizable(b"a" + bad + b"z" + bad) == b"a" + mark * 4 + b"z" + mark * 4
    for kept in ("plain \u00e9 \u2082 \U0010ffff".encode(), b"\xff\xfe", b"\xf4\x90\x80", b"\xf8\x88\x80\x80\x80"):
        assert tokenizable(kept) == kept


@pytest.mark.parametrize("text", [BEYOND, b"def " + BEYOND * 3, b"\xf7\xbf\xbf\xbf", b"\xff", b"\xf4"])
def test_tokenizers_take_any_bytes(tiny_target: Path, tiny_drafter: Path, qwen35: Path, text: bytes) -> None:
    escaped = text.decode("utf-8", "surrogateescape")
    with closing(spec_session(tiny_target, tiny_drafter)) as session:
        ids = session.tokenize(text, add_bos=False)
        assert session.detokenize(ids).replace("\ufffd".encode(), b"") == text.removesuffix(text.lstrip(b"def "))
        with pytest.raises(ConfigError, match="bytes"):
            session.tokenize("text")  # type: ignore[arg-type]
    assert token_counter(tiny_target)(escaped) == len(ids)
    with PFlash(qwen35, n_ctx=256, n_threads=1) as pflash:
        assert pflash.tokenize(escaped).size > 0


def test_ids_outside_the_vocabulary_have_no_text(tiny_target: Path, tiny_drafter: Path) -> None:
    with closing(spec_session(tiny_target, tiny_drafter)) as session:
        for ids in ([99999], [30, -1], "text"):
            with pytest.raises(ConfigError, match=r"token"):
                session.detokenize(ids)  # type: ignore[arg-type]
        assert session.detokenize([]) == b"" and session.detokenize(np.array([40, 41])) == session.detokenize([40, 41])


def test_generate_takes_any_file(capsys: Any, tmp_path: Path, tiny_target: Path, tiny_drafter: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"def f" + BEYOND + b"(x):")
    for files in (["-md", str(tiny_drafter)], ["--no-draft"]):
        argv = ["generate", "-m", str(tiny_target), *files, "-f", str(tmp_path / "prompt")]
        assert main([*argv, "-n", "4", "-c", "256", "-t", "1", "--json"]) == 0, capsys.readouterr().err
