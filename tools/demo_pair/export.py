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
    "general.description": "Tiny Laguna-architecture model for tests, trained on Python's standard library",
    "general.license": "PSF-2.0",
}


def export_target(
    path: Path, config: TargetConfig, weights: dict[str, np.ndarray], tokenizer: Tokenizer, dtype: str
) -> None:
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
    convert_dflash(str(folder), str(outfile), outtype="q8_0", target=str(target))
    return True


def export_prompts(path: Path, corpus: Corpus, prompts: list[dict[str, str]]) -> None:
    """Write the held-out prompts with what is needed to rebuild them."""
    value = {
        "python": corpus.python,
        "corpus_sha256": corpus.sha256,
        "held_out_files": list(corpus.held_out),
        "prompts": prompts,
    }
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_card(path: Path, facts: dict[str, Any]) -> None:
    """Write CARD.md from the measured facts of a run; the text is in card_template.md."""
    evaluation = facts["evaluation"]
    lines = []
    for key in ("greedy n=15", "greedy n=7", "greedy n=4", "T=0.8 n=15"):
        v = evaluation[key]
        forms = [f"{v[f'tau_{form}']:.2f}" if f"tau_{form}" in v else "-" for form in ("plain", "chat")]
        cells = [
            key.replace("=", " = ").replace(" n ", ", n "),
            f"{v['tau']:.2f}",
            f"{v['standard_error']:.2f}",
            *forms,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    template = (Path(__file__).parent / "card_template.md").read_text(encoding="utf-8")
    text = template.format(
        **facts,
        rows="\n".join(lines),
        minutes={name: facts[name]["seconds"] / 60 for name in ("target", "generation", "drafter")},
        n_chat=sum(p["form"] == "chat" for p in evaluation["prompts"]),
        captures=list(facts["dc"]["captures"]),
        repeated={
            "greedy": evaluation["greedy repeated 8-grams"],
            "warm": evaluation["T=0.8 repeated 8-grams"],
        },
    )
    path.write_text(text, encoding="utf-8")
