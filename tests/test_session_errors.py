"""Bad settings and files, and the end of a session: typed errors that Llama's callers catch too, nothing aborted."""

import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from demo_pair.target_gguf import random_target
from fixtures import drafter_config, drafter_tensors, write_drafter_dir, write_drafter_gguf
from laguna_gguf import LagunaError, SpecSession
from laguna_gguf.errors import CheckpointError, ConfigError, DecodeError, SessionBusyError, TargetMismatchError
from session_tools import (
    FULL,
    GREEDY,
    OPTIONS,
    ForcedDrafts,
    plain_llama,
    spec_session,
    take,
    take_plain,
    text_ids,
)
from tiny_models import TINY_TARGET, write_tiny_target


@pytest.fixture(scope="module")
def session(tiny_target: Path, tiny_drafter: Path) -> SpecSession:
    return spec_session(tiny_target, tiny_drafter)


# Settings.


@pytest.mark.parametrize("value", [-1, 16, 2**40, "AUTO", "3", "", None, 2.5, 3.0, True, [3], float("nan")], ids=repr)
def test_draft_max(tiny_target: Path, tiny_drafter: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="draft_max"):
        spec_session(tiny_target, tiny_drafter, draft_max=value)


@pytest.mark.parametrize("draft_max", ["auto", 7])
@pytest.mark.parametrize("value", [-1, 16, 2**40, "1", None, 1.0, True], ids=repr)
def test_draft_min(tiny_target: Path, tiny_drafter: Path, value: Any, draft_max: Any) -> None:
    with pytest.raises(ConfigError, match="draft_min"):
        spec_session(tiny_target, tiny_drafter, draft_max=draft_max, draft_min=value)


def test_draft_min_above_draft_max(tiny_target: Path, tiny_drafter: Path) -> None:
    with pytest.raises(ConfigError, match="draft_min"):
        spec_session(tiny_target, tiny_drafter, draft_max=3, draft_min=4)
    assert spec_session(tiny_target, tiny_drafter, draft_max=3, draft_min=3).stats.draft_max_now == 3


@pytest.mark.parametrize("value", ["", "full", "PER_QUERY", None, 32, True], ids=repr)
def test_window(tiny_target: Path, tiny_drafter: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="window"):
        spec_session(tiny_target, tiny_drafter, window=value)


@pytest.mark.parametrize(
    ("draft_max", "sizes"),
    [
        (15, {"n_ubatch": 15}),
        (4, {"n_ubatch": 4}),
        (7, {"n_batch": 7}),
        (7, {"n_batch": 6, "n_ubatch": 64}),
        (5, {"n_ctx": 5}),
    ],
    ids=str,
)
def test_draft_max_reaches_the_micro_batch(
    tiny_target: Path, tiny_drafter: Path, draft_max: int, sizes: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match="n_ubatch"):
        spec_session(tiny_target, tiny_drafter, draft_max=draft_max, **sizes)
    larger = {name: size + 2 for name, size in sizes.items()}
    assert len(take(spec_session(tiny_target, tiny_drafter, draft_max=draft_max, **larger), [40], 2)) == 2


def test_draft_max_follows_the_block_size(tiny_target: Path, tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "drafter", block_size=5)
    with pytest.raises(ConfigError, match="draft_max"):
        spec_session(tiny_target, tmp_path / "drafter", draft_max=5)
    assert spec_session(tiny_target, tmp_path / "drafter", draft_max=4).stats.draft_max_now == 4


@pytest.mark.parametrize(
    "option",
    [
        {"draft_vocab": 3},
        {"pflash": "f.gguf"},
        {"prefill_compression": "auto"},
        {"prefill_compression": "maybe"},
        {"embedding": True},
        {"vocab_only": True},
        {"draft_model": LlamaPromptLookupDecoding()},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_do_not_fit(tiny_target: Path, tiny_drafter: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        spec_session(tiny_target, tiny_drafter, **option)


# Files.


def test_missing_files(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target, drafter in (
        (tmp_path / "no.gguf", tiny_drafter),
        (tmp_path, tiny_drafter),
        (tiny_drafter, tiny_drafter),
        (tiny_target, tmp_path / "no.gguf"),
        (tiny_target, tmp_path / "no"),
        (tiny_target, tmp_path / "empty"),
    ):
        with pytest.raises(LagunaError) as error:
            spec_session(target, drafter)
        assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
def test_drafter_as_target(tiny_drafter: Path, tmp_path: Path, dialect: Any) -> None:
    config = drafter_config()
    path = write_drafter_gguf(tmp_path / "drafter.gguf", drafter_tensors(config), config, dialect=dialect)
    with pytest.raises(TargetMismatchError, match="drafter"):
        spec_session(path, tiny_drafter)
    with pytest.raises(TargetMismatchError, match="drafter"):
        spec_session(path, path)


def test_target_as_drafter(tiny_target: Path) -> None:
    with pytest.raises(LagunaError, match="target") as error:
        spec_session(tiny_target, tiny_target)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    "overrides", [{"num_target_layers": 9}, {"hidden_size": 32}, {"vocab_size": 321}], ids=lambda o: next(iter(o))
)
def test_drafter_of_another_target(tiny_target: Path, tmp_path: Path, overrides: dict[str, int]) -> None:
    write_drafter_dir(tmp_path / "drafter", **overrides)
    with pytest.raises(TargetMismatchError):
        spec_session(tiny_target, tmp_path / "drafter")


@pytest.mark.parametrize("size", [0, 3, 24, 100, 5000, -200_000, -1])
def test_truncated_target(tiny_target: Path, tiny_drafter: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "cut.gguf").write_bytes(tiny_target.read_bytes()[:size])
    with pytest.raises(CheckpointError):
        spec_session(tmp_path / "cut.gguf", tiny_drafter)


@pytest.mark.parametrize("size", [0, 3, 24, 100, 3000, -50_000, -1])
def test_truncated_drafter(tiny_target: Path, tiny_drafter: Path, tmp_path: Path, size: int) -> None:
    config = drafter_config()
    whole = write_drafter_gguf(tmp_path / "drafter.gguf", drafter_tensors(config), config)
    assert spec_session(tiny_target, whole).drafter.config.vocab_size == 320
    (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:size])
    with pytest.raises(CheckpointError):
        spec_session(tiny_target, tmp_path / "cut.gguf")
    (tmp_path / "cut").mkdir()
    for file in tiny_drafter.iterdir():
        data = file.read_bytes()
        (tmp_path / "cut" / file.name).write_bytes(data if file.suffix == ".json" else data[:size])
    with pytest.raises(CheckpointError):
        spec_session(tiny_target, tmp_path / "cut")


def test_target_that_llama_cpp_refuses(tiny_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound GGUF file without one of the model's tensors."""
    from demo_pair import target_gguf

    tensors = random_target(TINY_TARGET, 1)
    shapes = target_gguf.tensor_shapes(TINY_TARGET)
    del tensors["blk.3.attn_q.weight"], shapes["blk.3.attn_q.weight"]
    monkeypatch.setattr(target_gguf, "tensor_shapes", lambda config: shapes)
    tokenizer = target_gguf.toy_tokenizer(TINY_TARGET.n_vocab)
    target_gguf.write_target_gguf(tmp_path / "t.gguf", TINY_TARGET, tensors, tokenizer, "f32")
    with pytest.raises(CheckpointError):
        spec_session(tmp_path / "t.gguf", tiny_drafter)


def test_another_architecture(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    data = tiny_target.read_bytes().replace(b"laguna", b"qwertz")
    (tmp_path / "other.gguf").write_bytes(data)
    with pytest.raises(TargetMismatchError, match="qwertz"):
        spec_session(tmp_path / "other.gguf", tiny_drafter)


def test_refused_drafter_leaves_no_trace(tiny_target: Path, tmp_path: Path) -> None:
    """A session whose constructor raised can be collected without a warning."""
    write_drafter_dir(tmp_path / "drafter", num_target_layers=9)
    with pytest.raises(TargetMismatchError):
        SpecSession(str(tiny_target), tmp_path / "drafter", **OPTIONS)
    gc.collect()


# The end.


def test_closed_session(tiny_target: Path, tiny_drafter: Path) -> None:
    session = spec_session(tiny_target, tiny_drafter)
    take(session, text_ids(20), 5)
    state = session.save_state()
    drafter = session.drafter
    session.close()
    session.close()
    calls: tuple[Callable[[SpecSession], object], ...] = (
        lambda s: next(s.generate([40])),
        lambda s: s.eval([40]),
        lambda s: s("text"),
        lambda s: s([40], stream=True).__next__(),
        lambda s: s.reset(),
        lambda s: s.load_state(state),
    )
    for call in calls:
        with pytest.raises(DecodeError, match="closed"):
            call(session)
    assert session.stats.rounds == 4
    assert session.drafter is drafter and not drafter.has_target
    with pytest.raises(TargetMismatchError):
        drafter.draft(40, 3)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_close_while_a_generator_is_suspended(
    tiny_target: Path, tiny_drafter: Path, plain: llama_cpp.Llama, n: int
) -> None:
    prompt = text_ids(20)
    for go_on in (True, False):
        session = spec_session(tiny_target, tiny_drafter)
        expected = take_plain(plain, prompt, 20, **GREEDY)
        forced = ForcedDrafts(session, prompt, expected, (FULL,))
        stream = session.generate(prompt, **GREEDY)
        assert list(islice(stream, n)) == expected[:n]
        forced.remove()
        session.close()
        if go_on:
            with pytest.raises(SessionBusyError):
                next(stream)
        stream.close()


def test_dropped_without_close(tiny_target: Path, tiny_drafter: Path) -> None:
    """No warning and no cycle: the memory is free when the last reference is gone."""
    session = spec_session(tiny_target, tiny_drafter)
    stream = session.generate(text_ids(20))
    list(islice(stream, 4))
    freed: list[int] = []
    session._stack.callback(freed.append, 1)
    drafter = session.drafter
    gc.disable()
    try:
        del session, stream
        assert freed == [1]
    finally:
        gc.enable()
    assert not drafter.has_target
    gc.collect()


def test_interpreter_ends_with_open_sessions(tiny_target: Path, tiny_drafter: Path) -> None:
    program = (
        "import sys; from laguna_gguf import SpecSession\n"
        "session = SpecSession(sys.argv[1], sys.argv[2], n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)\n"
        "stream = session.generate([40, 41, 42]); next(stream); next(stream)\n"
        "keep = [session]; keep.append(keep); print('end')\n"
    )
    command = [sys.executable, "-c", program, str(tiny_target), str(tiny_drafter)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "Exception" not in done.stderr and "Traceback" not in done.stderr


def test_other_windows_do_not_matter(tiny_drafter: Path, tmp_path: Path) -> None:
    """Target and drafter need not have the same window."""
    target = write_tiny_target(tmp_path / "t.gguf", replace(TINY_TARGET, window=6))
    prompt = text_ids(50, 1)
    expected = take_plain(plain_llama(target), prompt, 20, **GREEDY)
    assert take(spec_session(target, tiny_drafter), prompt, 20, **GREEDY) == expected
