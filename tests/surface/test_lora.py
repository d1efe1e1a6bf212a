"""LoRA adapters: the session is the adapted target's, and the drafter reads the adapted hidden states."""

import ctypes
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest

from session_tools import GREEDY, MIXED, ForcedDrafts, plain_llama, spec_session, take, take_plain, text_ids
from surface_tools import PROMPT, Rivals
from tiny_models import TINY_TARGET


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter of rank 4 on queries, the dense feed-forward block and the head."""
    path = tmp_path_factory.mktemp("lora") / "adapter.gguf"
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(str(path), "laguna")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    width = TINY_TARGET.n_embd
    shapes = {"output": (TINY_TARGET.n_vocab, width), "blk.0.ffn_up": (TINY_TARGET.n_ff, width)}
    shapes |= {f"blk.{i}.attn_q": (TINY_TARGET.n_head(i) * TINY_TARGET.head_dim, width) for i in (0, 3, 7)}
    for name, (n_out, n_in) in shapes.items():
        writer.add_tensor(f"{name}.weight.lora_a", rng.standard_normal((4, n_in)).astype(np.float32) / 4)
        writer.add_tensor(f"{name}.weight.lora_b", rng.standard_normal((n_out, 4)).astype(np.float32) / 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_adapter_from_the_start(tiny_target: Path, tiny_drafter: Path, adapter: Path, scale: float) -> None:
    options: dict[str, Any] = {"lora_path": str(adapter), "lora_scale": scale}
    adapted = Rivals(
        plain_llama(tiny_target, **options),
        spec_session(tiny_target, tiny_drafter, **options),
        plain_llama(tiny_target, **options),
    )
    answer = adapted.check(lambda llama: llama(PROMPT, temperature=0.0, max_tokens=40))
    bare = plain_llama(tiny_target)(PROMPT, temperature=0.0, max_tokens=40)
    assert answer["choices"][0]["text"] != bare["choices"][0]["text"]
    adapted.check(lambda llama: take(llama, text_ids(50, 1), 60, seed=3))


def test_adapter_set_later(tiny_target: Path, tiny_drafter: Path, adapter: Path) -> None:
    """Set through llama.cpp's own call, followed by reset() (what is cached was computed without it)."""
    session, plain = spec_session(tiny_target, tiny_drafter), plain_llama(tiny_target)
    prompt = text_ids(40, 1)
    before = take(session, prompt, 20, **GREEDY)
    kept = []
    for llama in (session, plain):
        lora = llama_cpp.llama_adapter_lora_init(llama.model, str(adapter).encode())
        kept.append(lora)
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(lora)
        assert llama_cpp.llama_set_adapters_lora(llama.ctx, adapters, 1, (ctypes.c_float * 1)(1.0)) == 0
        llama.reset()
    expected = take_plain(plain, prompt, 40, **GREEDY)
    assert expected[:20] != before
    forced = ForcedDrafts(session, prompt, expected, MIXED)
    assert take(session, prompt, 30, **GREEDY) == expected[:30]
    forced.remove()
    for llama in (session, plain):
        llama_cpp.llama_set_adapters_lora(llama.ctx, None, 0, None)
        llama.reset()
    assert take(session, prompt, 20, **GREEDY) == before
