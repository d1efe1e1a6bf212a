"""`laguna-gguf bench`: rows like llama-bench's, with and without drafts; `--check`: is the text the same."""

import argparse
import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from laguna_gguf.argument_types import at_least_zero, positive
from laguna_gguf.bench import report
from laguna_gguf.bench.check import Checked, check
from laguna_gguf.bench.costs import measure_costs
from laguna_gguf.bench.engines import Engine, Generator, SessionEngine, same_model
from laguna_gguf.bench.header import header
from laguna_gguf.bench.measure import Case, longest, measure_generation, measure_prompt
from laguna_gguf.bench.prompts import Prompts, filler, load_prompts, load_vocabulary
from laguna_gguf.bench.rows import Row, generation_rows, prompt_rows
from laguna_gguf.bench.upstream import SERVER_TYPES, ServerEngine, check_xllamacpp, make_lookup
from laguna_gguf.commands import arguments
from laguna_gguf.commands.output import note, print_plan
from laguna_gguf.dflash.session import SpecSession
from laguna_gguf.dflash.target import check_target_file
from laguna_gguf.errors import ConfigError
from laguna_gguf.memory_plan import plan_memory

DRAFTS: tuple[int | str, ...] = (3, 7, "auto")
CHECK_DRAFTS: tuple[int | str, ...] = (7,)
"""Not "auto", which may decode plainly and then shows nothing."""

CHECK_KIND = "code"
CHECK_PROMPTS = 3
CONTEXT_STEP = 256
COST_CONTEXT = 512
"""Tokens of context in which the parts of a round are measured: the drafter's whole window."""


def add_parser(subparsers: Any) -> None:
    """Add `bench` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measure speed with and without drafts, or check that the text is the same",
        description="Measure a target and its drafter: rows like llama-bench's, with tokens a round (tau), acceptance "
        "and the ratio to plain decoding, by kind of prompt. Plain decoding is the faster of llama_cpp.Llama and "
        "SpecSession(draft_max=0). All ways of decoding take turns.",
        allow_abbrev=False,
    )
    models = parser.add_argument_group("models")
    models.add_argument("-m", "--model", type=Path, required=True, metavar="TARGET", help="target GGUF")
    models.add_argument(
        "-md",
        "--spec-draft-model",
        "--model-draft",
        dest="draft_model",
        type=Path,
        metavar="DRAFTER",
        help="DFlash drafter; without one, plain decoding alone is measured",
    )
    tests = parser.add_argument_group("tests (lists are separated by commas)")
    count = arguments.numbers(0)
    tests.add_argument("-p", "--n-prompt", type=count, default=(512,), metavar="N,...", help="default 512, 0 = none")
    tests.add_argument("-n", "--n-gen", type=count, default=(128,), metavar="N,...", help="default 128, 0 = none")
    tests.add_argument("-d", "--n-depth", type=count, default=(0,), metavar="N,...", help="context before, default 0")
    tests.add_argument("-r", "--repetitions", type=positive, metavar="N", help="default 5, with --check 3")
    tests.add_argument(
        "--spec-draft-n-max",
        type=arguments.depths,
        metavar="N|auto,...",
        help="drafts a round; default 3,7,auto, with --check 7",
    )
    tests.add_argument("--prompts", type=Path, metavar="FILE", help="JSON: kind to list of prompts; else one prompt")
    tests.add_argument(
        "--kinds", type=lambda text: tuple(text.split(",")), default=(), metavar="K,...", help="only these"
    )
    tests.add_argument("--temp", type=at_least_zero, default=0.0, metavar="T", help="default 0, greedy")
    arguments.add_synthetic(tests)
    more = parser.add_argument_group("more")
    more.add_argument("--costs", action="store_true", help="also measure drafting and verifying alone")
    more.add_argument(
        "--compare", action="store_true", help="also llama_cpp's prompt lookup and llama-server's n-grams"
    )
    more.add_argument(
        "--check",
        dest="check_text",
        action="store_true",
        help="instead: three code prompts with and without drafts; exit 1 unless rounding explains every difference",
    )
    arguments.add_runtime(parser)
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", choices=("md", "json", "csv"), default="md", help="default md")
    output.add_argument("--json", dest="output", action="store_const", const="json", help="-o json")
    output.add_argument("-v", "--verbose", action="store_true", help="llama.cpp's log and tracebacks on stderr")
    parser.set_defaults(run=run, check=lambda args: _check_arguments(parser, args))


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code: 1 when --check finds a difference that rounding does not explain."""
    check_target_file(args.model)
    if args.compare:
        check_xllamacpp()
    repetitions = args.repetitions or (3 if args.check_text else 5)
    with contextlib.closing(load_vocabulary(args.model)) as vocabulary:
        kinds = args.kinds or ((CHECK_KIND,) if args.check_text and args.prompts is None else ())
        prompts = load_prompts(vocabulary, args.prompts, kinds)
    cases = [Case(n_prompt=n, n_depth=d) for d in args.n_depth for n in args.n_prompt if n and not args.check_text]
    cases += [Case(n_gen=n, n_depth=d) for d in args.n_depth for n in args.n_gen if n]
    keywords = _llama_keywords(args, _context(args, cases, prompts))
    plan = {k: v for k, v in keywords.items() if not k.startswith("n_threads") and k != "verbose"}
    print_plan(plan_memory(args.model, args.draft_model, **plan))
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(contextlib.closing(_open(args, keywords)))
        session = owner if isinstance(owner, SpecSession) else None
        config = session.drafter.config if session else None
        settings = keywords | {"temperature": args.temp, "repetitions": repetitions}
        head = header(owner, args.model, args.draft_model, config, settings)
        if args.check_text:
            assert session is not None
            texts = [prompt for group in prompts.values() for prompt in group][:CHECK_PROMPTS]
            results = check(session, args.spec_draft_n_max or CHECK_DRAFTS, texts, args.n_gen[0], repetitions)
            _print_check(args.output, head, results)
            return 0 if all(result.ok for result in results) else 1
        rows = _measure(args, stack, owner, keywords, cases, prompts, repetitions)
        costs = []
        if args.costs:
            assert session is not None
            drafts = [n for n in args.spec_draft_n_max or DRAFTS if isinstance(n, int)]
            costs = measure_costs(session, filler(prompts, COST_CONTEXT), drafts, repetitions)
    _print_rows(args.output, head, rows, costs)
    return 0


def _check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    arguments.check_cache(parser, args)
    if args.draft_model is None and (args.check_text or args.costs or args.spec_draft_n_max or args.spec_synth_len):
        parser.error("-md is needed: without a drafter there is nothing to check, to accept or to cost")
    if args.check_text and (args.spec_synth_len is not None or args.temp > 0 or args.compare or args.costs):
        parser.error("--check compares greedy texts; it goes with none of --spec-synth-len, --temp, --compare, --costs")
    if args.check_text and not args.n_gen[0]:
        parser.error("--check generates text; -n must be at least 1")
    if args.check_text and args.output == "csv":
        parser.error("--check prints md or json")
    if not args.check_text and not any(args.n_prompt) and not any(args.n_gen):
        parser.error("-p 0 and -n 0 leave nothing to measure")
    if 1 in args.n_gen:
        parser.error("-n 1 has no time between tokens; needed at least 2")
    if args.costs and not any(isinstance(n, int) and n for n in args.spec_draft_n_max or DRAFTS):
        parser.error("--costs needs a number of drafts in --spec-draft-n-max")


def _context(args: argparse.Namespace, cases: Sequence[Case], prompts: Prompts) -> int:
    needed = longest(cases, prompts)
    if args.costs:
        needed = max(needed, COST_CONTEXT)
    if args.n_ctx and args.n_ctx < needed:
        raise ConfigError(f"-c is {args.n_ctx}; these tests need at least {needed}")
    # llama.cpp rounds up to this, llama_cpp.Llama does not, and then drafts beyond its arrays.
    return -(-(args.n_ctx or needed) // CONTEXT_STEP) * CONTEXT_STEP


def _llama_keywords(args: argparse.Namespace, n_ctx: int) -> dict[str, Any]:
    return arguments.llama_keywords(args, n_ctx) | {
        "n_threads": args.threads,
        "n_threads_batch": args.threads_batch or args.threads,
        "verbose": args.verbose,
    }


def _open(args: argparse.Namespace, keywords: dict[str, Any]) -> llama_cpp.Llama:
    """What loads the target; everything else that runs in this process shares its weights."""
    if args.draft_model is None:
        return llama_cpp.Llama(str(args.model), **keywords)
    return SpecSession(args.model, args.draft_model, **keywords)


def _measure(
    args: argparse.Namespace,
    stack: contextlib.ExitStack,
    owner: llama_cpp.Llama,
    keywords: dict[str, Any],
    cases: Sequence[Case],
    prompts: Prompts,
    repetitions: int,
) -> list[Row]:
    engines = [Engine(owner, args.temp)]
    drafting: list[Engine] = []
    if isinstance(owner, SpecSession):
        with same_model(owner):
            llama = stack.enter_context(contextlib.closing(llama_cpp.Llama(str(args.model), **keywords)))
        drafts = dict.fromkeys([0, *(args.spec_draft_n_max or DRAFTS)])
        engines = [
            Engine(llama, args.temp),
            *(SessionEngine(owner, n, args.temp, args.spec_synth_len) for n in drafts),
        ]
        drafting = [engine for engine in engines if not engine.plain]
    generating: list[Generator] = list(engines)
    if args.compare:
        lookup = make_lookup(owner, str(args.model), args.temp, keywords)
        stack.enter_context(contextlib.closing(lookup.llama))
        # All at once, though each server holds a target of its own: rates taken at other times cannot be compared.
        servers = [
            stack.enter_context(contextlib.closing(ServerEngine(str(args.model), kind, args.temp, keywords)))
            for kind in SERVER_TYPES
        ]
        generating += [lookup, *servers]
    rows = []
    for case in cases:
        if case.n_prompt:
            # capture is the same at every depth
            captured = [copy.copy(engine) for engine in drafting[:1]]
            for engine in captured:
                engine.label = "dflash"
            plain = [engine for engine in engines if engine.plain]
            rows += prompt_rows(case, measure_prompt([*plain, *captured], case, prompts, repetitions))
        else:
            rows += generation_rows(case, measure_generation(generating, case, prompts, repetitions))
    return rows


def _print_rows(output: str, head: dict[str, Any], rows: Sequence[Row], costs: Sequence[dict[str, Any]]) -> None:
    if output == "json":
        print(report.to_json(head, rows, {"costs": list(costs)} if costs else {}), flush=True)
    elif output == "csv":
        print(report.to_csv(head, rows), flush=True)
    else:
        print(report.to_markdown(head, rows, costs), flush=True)


def _print_check(output: str, head: dict[str, Any], results: Sequence[Checked]) -> None:
    if output == "json":
        print(report.check_to_json(head, results), flush=True)
    else:
        print(report.check_to_markdown(head, results), flush=True)
    for result in results:
        if not result.ok:
            assert result.divergence is not None
            note(
                f"error: prompt {result.prompt}, {result.label}: the texts part at token {result.divergence.position} "
                f"with a gap of {result.divergence.gap:.4g} between the two best logits, but batch shapes change them "
                f"by {result.divergence.batch_difference:.4g} only; rounding does not explain it"
            )
