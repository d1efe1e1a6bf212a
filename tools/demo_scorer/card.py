"""The card of the demo scorer, from the facts of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from laguna_gguf.pflash.demo import DemoScorer

ROWS = (
    "last token + 8-token tail",
    "last token + 32-token tail",
    "last token",
    "8-token tail",
    "chunks of 128",
    "chunks of 512",
    "chunks of 1024 (default)",
    "untrained block 15",
    "BM25 of the last 8 tokens",
    "BM25 of the whole question",
    "head + tail",
    "random segments",
    "another question",
)
KINDS = ("note", "function", "partial", "raise", "phrase", "identifier")


def _share(table: dict[str, float], kind: str) -> str:
    return f"{table[kind]:.2f}" if kind in table else "-"


def main_table(report: dict[str, Any]) -> str:
    """Evidence kept by scorer: single needles at three ratios, three needles at 0.1."""
    lines = ["| scorer | one needle at .05 / .1 / .2 | three needles at .1 | all three |", "|---|---|---|---|"]
    kept = report["kept"]
    for name in ROWS:
        if name not in kept["0.1"]:
            continue
        single = " / ".join(_share(kept[ratio][name], "single") for ratio in ("0.05", "0.1", "0.2"))
        three = [_share(kept["0.1"][name], kind) for kind in ("three needles", "all three")]
        lines.append(f"| {name} | {single} | {three[0]} | {three[1]} |")
    return "\n".join(lines)


def kind_table(report: dict[str, Any]) -> str:
    """Evidence kept by kind of question at 0.1."""
    names = [name for name in ROWS if name in report["kept"]["0.1"]]
    lines = [f"| at .1 | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    lines += [
        f"| {name} | {' | '.join(_share(report['kept']['0.1'][name], kind) for kind in KINDS)} |" for name in names
    ]
    return "\n".join(lines)


def probe_table(report: dict[str, Any]) -> str:
    """F1 of boundaries by kind of text."""
    lines = ["| text | units F1 | sub-units F1 | functions and classes found |", "|---|---|---|---|"]
    for name, row in report["probe"].items():
        lines.append(f"| {name} | {row['unit']:.3f} | {row['subunit']:.3f} | {row['definitions found']:.3f} |")
    return "\n".join(lines)


def write_card(path: Path, files: DemoScorer, facts: dict[str, Any], report: dict[str, Any]) -> None:
    """Fill card_template.md."""
    template = (Path(__file__).parent / "card_template.md").read_text("utf-8")
    sizes = {name: getattr(files, name).stat().st_size / 1e6 for name in ("drafter", "scoring_head", "segment_probe")}
    text = template.format(
        sizes=sizes,
        facts=facts,
        report=report,
        main_table=main_table(report),
        kind_table=kind_table(report),
        probe_table=probe_table(report),
        counts=", ".join(f"{n} {kind}" for kind, n in report["questions"].items()),
    )
    path.write_text(text, "utf-8")
