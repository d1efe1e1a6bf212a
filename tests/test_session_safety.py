"""What would end the process in llama.cpp is an error here: closed targets, wild settings, interrupts, threads."""

import copy
import gc
import os
import pickle
import threading
import weakref
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest

from laguna_gguf import SpecSession, convert_dflash, load_drafter
from laguna_gguf.errors import (
    CheckpointError,
    ConfigError,
    DecodeError,
    LagunaError,
    SessionBusyError,
    TargetMismatchError,
)
from session_tools import GREEDY, spec_session, take, text_ids
from tiny_models import TINY_TARGET, write_tiny_target


def features(n_rows: int) -> np.ndarray:
    """Random hidden rows that fit `tiny_drafter`."""
    return np.random.default_rng(0).standard_normal((n_rows, 3, TINY_TARGET.n_embd)).astype(np.float32)


def test_target_closed_under_a_drafter(tiny_target: Path, tiny_drafter: Path) -> None:
    llama = llama_cpp.Llama(str(tiny_target), verbose=False, n_threads=1)
    drafter = load_drafter(tiny_drafter, target=llama, n_threads=1)
    drafter.append_context(features(4))
    llama.close()
    with pytest.raises(TargetMismatchError):
        drafter.draft(3, 3)
    with pytest.raises(TargetMismatchError, match="closed"):
        load_drafter(tiny_drafter, target=llama)


def test_closed_session(tiny_target: Path, tiny_drafter: Path) -> None:
    session = spec_session(tiny_target, tiny_drafter)
    drafter = load_drafter(tiny_drafter, target=session, n_threads=1)
    drafter.append_context(features(4))
    session.close()
    for call in (
        lambda: session.tokenize(b"x"),
        session.n_ctx,
        session.save_state,
        lambda: session("x"),
        lambda: drafter.draft(3, 3),
        lambda: load_drafter(tiny_drafter, target=session),
    ):
        with pytest.raises(DecodeError, match="closed"):
            call()


@pytest.mark.parametrize(
    "keywords",
    [
        {"type_k": 999},
        {"type_v": 4},
        {"n_threads": 100000},
        {"n_threads_batch": -1},
        {"n_batch": 0},
        {"n_ubatch": 0},
        {"n_ctx": -1},
        {"n_ctx": "a"},
        {"lora_path": "absent"},
    ],
)
def test_settings_that_llama_cpp_does_not_survive(
    tiny_target: Path, tiny_drafter: Path, keywords: dict[str, object]
) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=next(iter(keywords))):
        SpecSession(str(tiny_target), tiny_drafter, verbose=False, **keywords)
    if "n_threads" in keywords:
        with pytest.raises(ConfigError, match="n_threads"):
            load_drafter(tiny_drafter, n_threads=100000)


def test_damaged_tokens(tmp_path: Path, tiny_drafter: Path) -> None:
    """llama.cpp asserts that tokens differ."""
    path = write_tiny_target(tmp_path / "target.gguf")
    data = bytearray(path.read_bytes())
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]
    data[int(field.parts[field.data[200]].ctypes.data - field.parts[0].ctypes.data + field.offset)] = 0
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="tokens"):
        SpecSession(str(path), tiny_drafter, verbose=False)


@pytest.mark.parametrize("at", range(4))
def test_interrupt_in_a_decode(tiny_target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C between llama.cpp's return and ours: the next call is as on a fresh session."""
    session = spec_session(tiny_target, tiny_drafter, draft_max=3)
    prompt = text_ids(60, 3)
    decode, calls = llama_cpp.llama_decode, iter(range(1000))

    def interrupted(context: object, batch: object) -> int:
        code = decode(context, batch)
        if next(calls) == at:
            raise KeyboardInterrupt
        return code

    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            take(session, prompt, 20, **GREEDY)
    fresh = spec_session(tiny_target, tiny_drafter, draft_max=3)
    longer = prompt + text_ids(10, 4)
    assert take(session, longer, 20, **GREEDY) == take(fresh, longer, 20, **GREEDY)


def test_one_thread_at_a_time(tiny_target: Path, tiny_drafter: Path) -> None:
    session = spec_session(tiny_target, tiny_drafter, draft_max=3)
    stream = session.generate(text_ids(20, 1), **GREEDY)
    next(stream)
    errors: list[Exception] = []

    def intrude() -> None:
        for call in (lambda: take(session, text_ids(5, 2), 3, **GREEDY), session.reset, lambda: session.eval([1])):
            try:
                call()
            except SessionBusyError as error:
                errors.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert len(errors) == 3
    assert isinstance(next(stream), int)
    stream.close()
    thread = threading.Thread(target=lambda: take(session, text_ids(5, 2), 3, **GREEDY))
    thread.start()
    thread.join()
    assert session.n_tokens == 5 + 3 - 1


def test_no_copies(tiny_target: Path, tiny_drafter: Path) -> None:
    session = spec_session(tiny_target, tiny_drafter)
    for copying in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ConfigError, match="pickled"):
            copying(session)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are POSIX")
def test_converter_leaves_special_files_alone(tmp_path: Path, tiny_target: Path, tiny_drafter: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="pipe"):
        convert_dflash(tiny_drafter, pipe, target=tiny_target)
    assert pipe.is_fifo()


@pytest.mark.parametrize("arguments", [("a", 3), (None, 3), (5, "a"), (1.5, 3), (5, 2.7)])
def test_draft_arguments_are_integers(tiny_target: Path, tiny_drafter: Path, arguments: tuple) -> None:
    drafter = load_drafter(tiny_drafter, target=tiny_target, n_threads=1)
    with pytest.raises(ConfigError, match="integer"):
        drafter.draft(*arguments)


def test_close_and_save_state_wait_for_another_thread(tiny_target: Path, tiny_drafter: Path) -> None:
    session = spec_session(tiny_target, tiny_drafter)
    begun, go_on = threading.Event(), threading.Event()
    tokens: list[int] = []

    def generate() -> None:
        for token in session.generate(text_ids(20), **GREEDY):
            tokens.append(token)
            begun.set()
            assert go_on.wait(30)
            if len(tokens) == 30:
                break

    thread = threading.Thread(target=generate)
    thread.start()
    assert begun.wait(30)
    for call in (session.close, session.save_state):
        with pytest.raises(SessionBusyError, match="another thread"):
            call()
    go_on.set()
    thread.join()
    assert len(tokens) == 30 and session.save_state().n_tokens > 20
    session.close()
    session.close()
    with pytest.raises(DecodeError, match="closed"):
        session.save_state()


def test_a_dropped_session_frees_itself_with_its_generator(tiny_target: Path, tiny_drafter: Path) -> None:
    session = spec_session(tiny_target, tiny_drafter)
    stream = session.generate(text_ids(20), **GREEDY)
    thread = threading.Thread(target=next, args=(stream,))
    thread.start()
    thread.join()
    gone = weakref.ref(session)
    session.cycle = [session, stream]  # type: ignore[attr-defined]
    del session, stream
    gc.collect()
    assert gone() is None


def test_a_session_closes_behind_its_block(tiny_target: Path, tiny_drafter: Path) -> None:
    with spec_session(tiny_target, tiny_drafter) as session:
        assert len(take(session, text_ids(10), 5, **GREEDY)) == 5
    with pytest.raises(LagunaError, match="closed"):
        session.create_completion("a")
    with pytest.raises(RuntimeError, match="mine"), spec_session(tiny_target, tiny_drafter) as session:
        raise RuntimeError("mine")
    with pytest.raises(LagunaError, match="closed"):
        session.eval([1])


def test_from_pretrained_needs_the_drafters_repository() -> None:
    with pytest.raises(ConfigError, match="draft_repo_id"):
        SpecSession.from_pretrained("owner/target", "target.gguf")
