"""Printing rows: Markdown as llama-bench's, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from laguna_gguf.bench.check import Checked
from laguna_gguf.bench.rows import Row

SYNTHETIC_NOTE = (
    "SYNTHETIC acceptance (--spec-synth-len): drafts were accepted at random. tau and accept % were asked for, not "
    "measured; texts, hashes and repetition say nothing about the model."
)


def to_json(head: dict[str, Any], rows: Sequence[Row], extra: dict[str, Any]) -> str:
    """One object: rows, what they were measured on, and what else was measured."""
    synthetic = any(row.synthetic for row in rows)
    return json.dumps({"rows": [row.as_dict() for row in rows], "synthetic": synthetic, **extra, "header": head})


def to_csv(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """One line a row; what is the same for all of them comes last, as in llama-bench."""
    shared = {key: value for key, value in head.items() if isinstance(value, (str, int, float, type(None)))}
    out = io.StringIO()
    writer = None
    for row in rows:
        line = row.as_dict() | {"samples_ts": " ".join(f"{value:.6g}" for value in row.samples_ts)} | shared
        if writer is None:
            writer = csv.DictWriter(out, line.keys(), lineterminator="\n")
            writer.writeheader()
        writer.writerow(line)
    return out.getvalue().rstrip("\n")


def to_markdown(head: dict[str, Any], rows: Sequence[Row], costs: Sequence[dict[str, Any]] = ()) -> str:
    """Header lines and a table."""
    synthetic = any(row.synthetic for row in rows)
    lines = [*_title(head), *([SYNTHETIC_NOTE, ""] if synthetic else [])]
    lines += table(
        ["test", "prompts", "t/s", "tau", "accept %", "x plain", "repeated %", "identical", "output"],
        [
            [
                row.test,
                row.prompts,
                f"{row.t_s:.2f} ± {row.std:.2f}",
                _number(row.tau, ".2f"),
                _number(row.acceptance, ".1%").rstrip("%"),
                f"{row.ratio:.2f}",
                _number(row.repetition, ".0%").rstrip("%"),
                row.identical or "",
                row.hash or "",
            ]
            for row in rows
        ],
        "llrrrrrrl",
    )
    plain = {row.test: row.engine for row in rows if row.baseline}
    if plain:
        lines += ["", "plain is " + ", ".join(f"{engine} in {test}" for test, engine in plain.items())]
    if costs:
        lines += ["", "A round by its parts, each measured alone:", "", *cost_table(costs)]
    return "\n".join(lines)


def check_to_json(head: dict[str, Any], results: Sequence[Checked]) -> str:
    """One object: rows, and whether all of them are ok."""
    rows = [result.as_dict() for result in results]
    return json.dumps({"rows": rows, "ok": all(result.ok for result in results), "header": head})


def check_to_markdown(head: dict[str, Any], results: Sequence[Checked]) -> str:
    """Header lines, a table and a verdict."""
    rows = [result.as_dict() for result in results]
    cells = [
        [
            row["test"],
            "yes" if row["identical"] else f"no, at {row['first_difference']}",
            _number(row["gap"], ".4g"),
            _number(row["batch_difference"], ".4g"),
            _number(row["tau"], ".2f"),
            f"{row['t_s']:.2f} ± {row['std']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['repetition']:.0%}".rstrip("%"),
            row["hash"],
            row["plain_hash"],
        ]
        for row in rows
    ]
    heads = ["test", "identical", "top-2 gap", "batch shapes", "tau", "t/s", "x plain", "repeated %", "output", "plain"]
    identical = sum(row["identical"] for row in rows)
    verdict = f"{identical} of {len(rows)} texts are identical to plain decoding's."
    if identical < len(rows):
        excused = sum(result.ok and result.divergence is not None for result in results)
        verdict += (
            f" {excused} of the others part where two tokens are nearly tied: the gap between the two best logits is "
            "not larger than what the number of rows in a decode changes in them."
        )
    return "\n".join([*_title(head), *table(heads, cells, "llrrrrrrll"), "", verdict])


def cost_table(costs: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of the table of `measure_costs`."""
    cells = [
        [
            str(cost["n"]),
            _number(cost["draft_ms"], ".2f"),
            f"{cost['verify_ms']:.2f}",
            f"{cost['break_even_tau']:.2f}",
        ]
        for cost in costs
    ]
    return table(["drafts", "draft ms", "verify ms", "tau to break even"], cells, "rrrr")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Lines of a Markdown table that also reads well as text; align: l or r by column."""
    widths = [max(len(heads[i]), *(len(row[i]) for row in rows), 3) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, align, widths, strict=True)
        return "| " + " | ".join(f"{cell:{'<' if side == 'l' else '>'}{width}}" for cell, side, width in columns) + " |"

    rule = (
        "| " + " | ".join("-" * (w - 1) + (":" if a == "r" else "-") for a, w in zip(align, widths, strict=True)) + " |"
    )
    return [line(heads), rule, *(line(row) for row in rows)]


def _title(head: dict[str, Any]) -> list[str]:
    drafter = head["drafter_filename"]
    gib, billion = head["model_size"] / 2**30, head["model_n_params"] / 1e9
    devices = "; ".join(f"{device['name']} ({device['description']})" for device in head["devices"])
    return [
        f"model: {head['model_filename']}, {head['model_type']}, {gib:.2f} GiB, {billion:.2f} B parameters",
        f"drafter: {drafter}, {head['drafter_layers']} layers, block {head['drafter_block_size']}"
        if drafter
        else "drafter: none",
        f"devices: {devices}; threads {head['n_threads']}/{head['n_threads_batch']}, gpu layers {head['n_gpu_layers']}",
        f"context {head['n_ctx']}, batch {head['n_batch']}/{head['n_ubatch']}, "
        f"cache {head['type_k']}/{head['type_v']}, "
        f"flash attention {'on' if head['flash_attn'] else 'off'}, temperature {head['temperature']:g}, "
        f"{head['repetitions']} repetition(s)",
        f"laguna-gguf {head['laguna_gguf']}, llama-cpp-python {head['llama_cpp_python']}, ggml {head['ggml']}",
        "",
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
