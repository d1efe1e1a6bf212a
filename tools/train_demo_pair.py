"""Train the demo pair (a small Laguna target and its DFlash drafter) on the interpreter's own standard library.

The stages data, target, generate, drafter, evaluate and export run in order; a finished stage is skipped and an
interrupted training continues, so the same command resumes. `--smoke` runs everything on a tiny budget.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

STAGES = ("data", "target", "generate", "drafter", "evaluate", "export")
PROMPT_LENGTHS = [64, 72, 80, 88, 96, 104, 112, 120, 128]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, generated sequences and logs")
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished files")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--processes", type=int, default=2, help="one-thread training processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target-minutes", type=float, default=36, help="budget from which the steps are derived")
    parser.add_argument("--target-steps", type=int, help="exact number of steps instead of a budget")
    parser.add_argument("--sequences", type=int, default=8000, help="sequences generated for the drafter")
    parser.add_argument(
        "--drafter-minutes", type=float, default=25, help="at the speed of the first 40 %% of the steps"
    )
    parser.add_argument("--drafter-steps", type=int)
    parser.add_argument("--held-out-files", type=int, default=40)
    parser.add_argument("--held-out-prompts", type=int, default=32)
    parser.add_argument("--smoke", action="store_true", help="few steps on a small share of the corpus, no compilation")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.target_steps = arguments.target_steps or 6
        arguments.drafter_steps = arguments.drafter_steps or 6
        arguments.sequences = min(arguments.sequences, 40)
    return arguments


def log(work: Path, text: str) -> None:
    """Print a line with the time, and append it to the log."""
    line = f"{time.strftime('%H:%M:%S')} {text}"
    print(line, flush=True)
    with open(work / "training.log", "a", encoding="utf-8") as file:
        file.write(line + "\n")


def prepare_data(a: argparse.Namespace) -> None:
    """Tokenizer, documents and prompts."""
    from demo_pair.data import documents, held_out_prompts, load_corpus, train_tokenizer
    from demo_pair.export import export_prompts
    from demo_pair.target_gguf import EOS_ID, TargetConfig

    corpus = load_corpus(a.seed, a.held_out_files, 40 if a.smoke else None)
    tokenizer = train_tokenizer(corpus, TargetConfig.n_vocab)
    tokenizer.save(str(a.work / "tokenizer.json"))
    parts = {"train": corpus.train, "held": corpus.held_out}
    docs = {name: documents(corpus, files, tokenizer) for name, files in parts.items()}
    prompts = held_out_prompts(corpus, tokenizer, 4 if a.smoke else a.held_out_prompts, a.seed)
    export_prompts(a.out / "heldout_prompts.json", corpus, prompts)
    ids = [{**p, "ids": [EOS_ID, *tokenizer.encode(p["prompt"]).ids]} for p in prompts]
    with open(a.work / "data.pickle", "wb") as file:
        pickle.dump({"docs": docs, "prompts": ids}, file)
    facts = {
        "python": corpus.python,
        "corpus_sha256": corpus.sha256,
        "train_files": len(corpus.train),
        "held_files": len(corpus.held_out),
        "train_tokens": sum(len(d.ids) for d in docs["train"]),
    }
    (a.work / "data.json").write_text(json.dumps(facts, indent=1))
    log(a.work, f"data: {facts}, {len(prompts)} prompts")


def worker(rank: int, a: argparse.Namespace, stage: str) -> None:
    """One process of a training or generation stage."""
    import numpy as np
    import torch

    from demo_pair.data import generation_prompts
    from demo_pair.drafter import DrafterConfig
    from demo_pair.generate import generate_sequences
    from demo_pair.optim import Plan, start_process
    from demo_pair.target import TargetModel
    from demo_pair.target_gguf import TargetConfig
    from demo_pair.train import Settings, sequence_arrays, train_drafter, train_target

    start_process(rank, a.processes, a.work / f"rendezvous-{stage}")
    say = functools.partial(log, a.work) if rank == 0 else lambda text: None
    with open(a.work / "data.pickle", "rb") as file:
        data = pickle.load(file)
    settings = Settings(a.work, a.seed, compile=not a.smoke)
    if stage == "target":
        plan = Plan(a.target_minutes, a.target_steps)
        train_target(TargetConfig(), data["docs"]["train"], data["docs"]["held"], plan, settings, say)
        return
    target = TargetModel(TargetConfig())
    target.load_state_dict(torch.load(a.work / "target.pt", weights_only=True))
    config, length = DrafterConfig(), max(PROMPT_LENGTHS) * 2
    if stage == "generate":
        rng = np.random.default_rng([a.seed, 2])
        prompts = generation_prompts(data["docs"]["train"], a.sequences, PROMPT_LENGTHS, 0.25, rng)
        out = sequence_arrays(a.work, a.sequences, length, config, "r+")
        started = time.monotonic()
        generate_sequences(target, prompts, out, config.captures, a.seed, say, 8 if a.smoke else 96)
        if rank == 0:
            report = {"sequences": a.sequences, "seconds": time.monotonic() - started}
            (a.work / "generation.json").write_text(json.dumps(report))
    else:
        sequences = sequence_arrays(a.work, a.sequences, length, config, "r")
        n_train = a.sequences - max(4, min(64, a.sequences // 10))
        train_drafter(config, target, sequences, n_train, Plan(a.drafter_minutes, a.drafter_steps), settings, say)


def run_processes(a: argparse.Namespace, stage: str) -> None:
    """Run a stage in `a.processes` processes."""
    import torch.multiprocessing as mp

    (a.work / f"rendezvous-{stage}").unlink(missing_ok=True)
    mp.spawn(worker, (a, stage), nprocs=a.processes)


def load_models(a: argparse.Namespace) -> tuple:
    """The trained target and drafter."""
    import torch

    from demo_pair.drafter import DrafterConfig, DrafterModel
    from demo_pair.target import TargetModel
    from demo_pair.target_gguf import TargetConfig

    target, drafter = TargetModel(TargetConfig()), DrafterModel(DrafterConfig())
    target.load_state_dict(torch.load(a.work / "target.pt", weights_only=True))
    drafter.load_state_dict(torch.load(a.work / "drafter.pt", weights_only=True))
    return target, drafter


def export_target_file(a: argparse.Namespace) -> Path:
    """Write the target's GGUF file."""
    import torch
    from tokenizers import Tokenizer

    from demo_pair.export import export_target
    from demo_pair.target import TargetModel
    from demo_pair.target_gguf import TargetConfig

    target = TargetModel(TargetConfig())
    target.load_state_dict(torch.load(a.work / "target.pt", weights_only=True))
    path = a.out / "demo-target-q8_0.gguf"
    export_target(path, target.config, target.to_numpy(), Tokenizer.from_file(str(a.work / "tokenizer.json")), "q8_0")
    log(a.work, f"wrote {path.name}, {path.stat().st_size / 1e6:.1f} MB")
    return path


def evaluate(a: argparse.Namespace) -> None:
    """Measure tau on the held-out prompts."""
    import torch

    from demo_pair.evaluate import evaluate_pair

    torch.set_num_threads(1)
    target, drafter = load_models(a)
    with open(a.work / "data.pickle", "rb") as file:
        prompts = pickle.load(file)["prompts"]
    report = evaluate_pair(target, drafter, prompts, 16 if a.smoke else 128, a.seed)
    (a.work / "evaluation.json").write_text(json.dumps(report, indent=1))
    log(a.work, "evaluation: " + json.dumps({key: value for key, value in report.items() if key != "prompts"}))


def export(a: argparse.Namespace) -> None:
    """Write all finished files."""
    import torch

    from demo_pair.export import convert_drafter, export_drafter, write_card
    from demo_pair.train import Settings

    target, drafter = load_models(a)
    target_path = export_target_file(a)
    folder = a.work / "drafter-hf"
    export_drafter(folder, drafter.config, {n: p.detach().numpy() for n, p in drafter.weights.items()})
    drafter_path = a.out / "demo-drafter-q8_0.gguf"
    if not convert_drafter(folder, drafter_path, target_path):
        log(a.work, "laguna_gguf is not installed: the drafter stays a Hugging Face checkpoint")
    stages = ("data", "target", "generation", "drafter", "evaluation")
    facts = {name: json.loads((a.work / f"{name}.json").read_text()) for name in stages}
    for name, model in (("target", target), ("drafter", drafter)):
        facts[name]["parameters"] = sum(p.numel() for p in model.parameters())
    settings = Settings(a.work)
    facts["target"]["batch_tokens"] = settings.batch * a.processes * settings.length
    facts["target"]["megabytes"] = target_path.stat().st_size / 1e6
    stored = drafter_path if drafter_path.exists() else folder / "model.safetensors"
    facts["drafter"]["megabytes"] = stored.stat().st_size / 1e6
    facts |= {"torch": torch.__version__, "tc": asdict(target.config), "dc": drafter.config.to_dict()}
    facts["command"] = (a.work / "command.txt").read_text().strip()
    write_card(a.out / "CARD.md", facts)


def record_command(a: argparse.Namespace) -> None:
    """Keep the training command for the card, without folders of this machine."""
    words = [word for word in sys.argv[1:] if word not in (str(a.work), str(a.out))]
    words = [{"--work": "--work WORK", "--out": "--out OUT"}.get(word, shlex.quote(word)) for word in words]
    if "drafter" in a.stages:
        (a.work / "command.txt").write_text(" ".join(["python tools/train_demo_pair.py", *words]) + "\n")


def main() -> None:
    """Run the stages that are not finished yet."""
    a = parse_arguments()
    a.work.mkdir(parents=True, exist_ok=True)
    a.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(a.work / "inductor"))
    record_command(a)
    results = {"data": "data.json", "target": "target.json", "generate": "generation.json", "drafter": "drafter.json"}
    for stage in a.stages:
        if stage in results and (a.work / results[stage]).exists():
            log(a.work, f"{stage}: finished before")
            continue
        if stage == "data":
            prepare_data(a)
        elif stage == "evaluate":
            evaluate(a)
        elif stage == "export":
            export(a)
        else:
            if stage == "generate":
                from demo_pair.drafter import DrafterConfig
                from demo_pair.train import sequence_arrays

                sequence_arrays(a.work, a.sequences, max(PROMPT_LENGTHS) * 2, DrafterConfig(), "w+")
            run_processes(a, stage)
            if stage == "target":
                export_target_file(a)


if __name__ == "__main__":
    main()
