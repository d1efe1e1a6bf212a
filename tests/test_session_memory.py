"""Memory: flat over many rounds, and no second copy of the target's embeddings or head."""

import gc
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from fixtures import write_drafter_dir
from laguna_gguf import load_drafter
from session_tools import SAMPLED, plain_llama, spec_session, text_ids
from tiny_models import TINY_TARGET, write_tiny_target

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MB = 1 << 20


def memory(key: str) -> int:
    """Bytes of this process under a key of smaps_rollup."""
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, *rest = line.split()
        if name == f"{key}:":
            return int(rest[0]) * 1024
    raise AssertionError(key)


def test_two_thousand_rounds(tiny_target: Path, tiny_drafter: Path) -> None:
    session = spec_session(tiny_target, tiny_drafter, draft_max=2, n_ctx=256, swa_full=False)
    sizes: list[int] = []
    request = 0
    for checkpoint in (500, 2000):
        while session.stats.rounds < checkpoint:
            request += 1
            if request % 4 == 0:
                session.reset()
            prompt = text_ids(20 + request % 50, request % 7)
            for _ in islice(session.generate(prompt, **SAMPLED), 100):
                pass
        sizes.append(memory("Rss"))
    assert sizes[1] - sizes[0] < 2 * MB


def test_no_second_copy_of_the_head(tmp_path: Path) -> None:
    """f32 head and embedding of 35 MiB each stay in the mapped file, whether bound to a Llama or to a session."""
    config = replace(TINY_TARGET, n_vocab=18_000, n_embd=512, n_layer=2)
    target = write_tiny_target(tmp_path / "t.gguf", config)
    head = config.n_vocab * config.n_embd * 4
    write_drafter_dir(
        tmp_path / "drafter",
        hidden_size=512,
        vocab_size=config.n_vocab,
        num_hidden_layers=2,
        num_target_layers=2,
        target_layer_ids=[0, 1],
    )
    options = {"n_ctx": 256, "n_batch": 16, "n_ubatch": 16}
    first = memory("Anonymous")
    plain = plain_llama(target, **options)
    list(islice(plain.generate([40, 41, 42]), 3))
    loaded = memory("Anonymous")
    assert loaded - first < head / 2  # the target itself is mapped
    drafter = load_drafter(tmp_path / "drafter", target=plain, n_threads=1)
    drafter.append_context(np.ones((40, 2, 512), np.float32))
    assert len(drafter.draft(40, 15).tokens) == 15
    bound = memory("Anonymous")
    assert bound - loaded < head / 2
    assert bound - loaded < sum(drafter.memory().values()) + 4 * MB

    session = spec_session(target, tmp_path / "drafter", **options)
    assert len(list(islice(session.generate([40, 41, 42]), 9))) == 9
    assert memory("Anonymous") - bound < (loaded - first) + (bound - loaded) + head / 4
    session.close()
    plain.close()
    target.unlink()
