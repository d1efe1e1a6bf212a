"""Write the trained pair: the target as GGUF, the drafter as a Hugging Face checkpoint, the prompts and the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from .data import Corpus, gguf_tokenizer
from .drafter import DrafterConfig
from .target_gguf import TargetConfig, write_target_gguf

METADATA = {
    "general.name": "Laguna demo target",
    "general.description": "A tiny Laguna-architecture model for demonstrations and tests, trained on Python's standard library",
    "general.license": "PSF-2.0",
}


def export_target(path: Path, config: TargetConfig, weights: dict[str, np.ndarray], tokenizer: Tokenizer, dtype: str) -> None:
    """Write the target; `weights` carry GGUF names."""
    write_target_gguf(path, config, weights, gguf_tokenizer(tokenizer), dtype, METADATA)


def export_drafter(folder: Path, config: DrafterConfig, weights: dict[str, np.ndarray]) -> None:
    """Write `config.json` and `model.safetensors` (bfloat16); `weights` carry checkpoint names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.hf_config(), indent=2) + "\n")
    save_file({name: value.astype(ml_dtypes.bfloat16) for name, value in weights.items()}, folder / "model.safetensors")


def convert_drafter(folder: Path, outfile: Path, target: Path) -> bool:
    """Convert the checkpoint to GGUF with laguna_gguf where it is installed; says whether that was possible."""
    try:
        from laguna_gguf import convert_dflash
    except ImportError:
        return False
    convert_dflash(str(folder), str(outfile), outtype="bf16", target=str(target))
    return True


def export_prompts(path: Path, corpus: Corpus, prompts: list[dict[str, str]]) -> None:
    """Write the held-out prompts with what is needed to rebuild them."""
    value = {"python": corpus.python, "corpus_sha256": corpus.sha256, "held_out_files": list(corpus.held_out), "prompts": prompts}
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_card(path: Path, facts: dict[str, Any]) -> None:
    """Write CARD.md from the measured facts of a run."""
    t, d, e, g = facts["target"], facts["drafter"], facts["evaluation"], facts["generation"]

    def row(key: str, label: str) -> str:
        v = e[key]
        forms = " | ".join(f"{v[f'tau_{form}']:.2f}" if f"tau_{form}" in v else "-" for form in ("plain", "chat"))
        return f"| {label} | {v['tau']:.2f} | {v['standard_error']:.2f} | {forms} |"

    chat = sum(p["form"] == "chat" for p in e["prompts"])
    text = f"""# Demo pair: a small Laguna target and its DFlash drafter

For demonstrations and tests only: the target writes text that looks like Python and knows nothing. Both models were
trained from scratch by `tools/train_demo_pair.py` on two CPU cores.

| file | contents | size |
|---|---|---|
| `demo-target-f16.gguf` | target, arch `laguna`, {t['parameters']:,} parameters, F16 (norms, router and biases F32) | {facts['target_bytes'] / 1e6:.1f} MB |
| `demo-drafter-bf16.gguf` | drafter, {d['parameters']:,} parameters, BF16 | about {d['parameters'] * 2 / 1e6:.1f} MB |
| `heldout_prompts.json` | {e['n_prompts']} prompts from files that no model and no tokenizer was trained on | |

## Data

The standard library of CPython {facts['python']} (`Lib/**/*.py` without tests, encodings and turtledemo), PSF licence;
SHA-256 over paths and contents `{facts['corpus_sha256']}`. {facts['train_files']} files ({facts['train_tokens']:,} tokens
with the chat forms) for training, {facts['held_files']} held out by a fixed seed before anything was trained. A third of the files are
also shown in chat form: a function's signature and docstring as the user's turn, its source as the assistant's.
Because a chat answer begins with a copy of the prompt, the two forms are reported apart.

## Models

Target: hidden {facts['target_config']['n_embd']}, {facts['target_config']['n_layer']} layers (full attention at 0 and 4, else window {facts['target_config']['window']}), 8 experts top-2 plus a shared one, byte-level BPE of
{facts['target_config']['n_vocab']:,} ids with Laguna's pre-tokenizer; Muon for matrices and AdamW for the rest, bfloat16 autocast, {t['batch_tokens']:,} tokens a step,
constant learning rate for 40 % of the steps, then linear decay. Drafter: {facts['drafter_config']['n_layer']} layers, captures {list(facts['drafter_config']['captures'])}, block {facts['drafter_config']['block_size']},
window {facts['drafter_config']['window']} (smaller than the usual 512, so that a reader that ignores the key is noticed), norm weights started in [0.7, 1.3]. It was
trained on {g['sequences']:,} continuations by the target itself of distinct prompts from training files (75 % greedy, 20 % at T = 0.7,
5 % at T = 1), with the mean of cross-entropy on the target's greedy choice and on its distribution, row weights
exp(-(j-1)/6), blocks of 8 rows in the first half of the run and of 16 after that, and in the last third half of the
weight on the expected accepted prefix.

## Run

    {facts['command']}

The planned step counts make the run repeatable: `--target-steps {t['steps']} --sequences {g['sequences']} --drafter-steps {d['steps']}`
instead of the minutes (up to rounding, which depends on the machine).
torch {facts['torch']}, two one-thread processes; target {t['seconds'] / 60:.0f} min, generation {g['seconds'] / 60:.0f} min, drafter {d['seconds'] / 60:.0f} min on a machine that was shared with other work.

## Measured

| | |
|---|---|
| target: tokens seen, epochs | {t['tokens'] / 1e6:.2f} M, {t['epochs']:.2f} |
| target: loss, last steps / held out | {t['train_loss']:.3f} / {t['held_out_loss']:.3f} nats a token |
| drafter: epochs over the sequences | {d['epochs']:.2f} |
| drafter: expected tokens a block from random anchors, training / unseen prompts | {d['train_block_tau']:.2f} / {d['unseen_block_tau']:.2f} |

tau = 1 + accepted / rounds, pooled over {e['n_prompts']} held-out prompts ({chat} in chat form) x {e['n_tokens']} tokens (less where the text ends earlier),
in float32 with the stored weights; the error is the standard error over prompts.

| text and drafts a round | tau | error | plain | chat |
|---|---|---|---|---|
{row("greedy n=15", "greedy, n = 15")}
{row("greedy n=7", "greedy, n = 7")}
{row("greedy n=4", "greedy, n = 4")}
{row("T=0.8 n=15", "T = 0.8, n = 15")}

Repeated 8-grams in the generated texts: {e['greedy repeated 8-grams']:.2f} greedy, {e['T=0.8 repeated 8-grams']:.2f} at T = 0.8. Greedy text of a model of this size
loops, and loops are easy to draft: tau of the pair says nothing of published models.
"""
    path.write_text(text, encoding="utf-8")
