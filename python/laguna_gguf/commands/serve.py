"""`laguna-gguf serve`: an OpenAI-compatible HTTP server over the user's own models."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from laguna_gguf.argument_types import count, port, positive
from laguna_gguf.commands import arguments
from laguna_gguf.commands.output import note
from laguna_gguf.commands.plan import planned_keywords
from laguna_gguf.dflash.target import check_target_file
from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.arguments import add_drafter, add_policy, policy_keywords

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")


def add_parser(subparsers: Any) -> None:
    """Add `serve` to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a target and a drafter over HTTP, OpenAI-compatible",
        description="Serve a target and a drafter over HTTP: /v1/chat/completions, /v1/completions, /v1/models, "
        "/health, /metrics. One request is worked on at a time; others wait in order. Needs the extra 'serve': "
        'pip install "laguna-gguf[serve]".',
        allow_abbrev=False,
    )
    arguments.add_models(parser, "plain decoding; the drafter is loaded and not used")
    _add_server(parser)
    arguments.add_sampling(parser, "sampling (for what a request leaves open)")
    arguments.add_runtime(parser)
    parser.add_argument_group("log probabilities").add_argument(
        "--logits-all",
        action="store_true",
        help="keep all logits, for requests with logprobs; takes context x vocabulary x 4 bytes and slower prompts",
    )
    arguments.add_drafting(parser)
    group = parser.add_argument_group("prompt compression (lossy)")
    add_drafter(group, "Qwen3.5 or Qwen3-0.6B GGUF that shortens long prompts")
    add_policy(group, "off")
    parser.add_argument_group("output").add_argument(
        "-v", "--verbose", action="store_true", help="requests, llama.cpp's log and tracebacks on stderr"
    )
    parser.set_defaults(run=run, check=lambda args: _check(parser, args))


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on; default 127.0.0.1")
    group.add_argument("--port", type=port, default=8080, metavar="N", help="default 8080; 0: a free one")
    group.add_argument("-a", "--alias", metavar="NAME", help="the model's name; default: the file's")
    group.add_argument(
        "--api-key", metavar="KEY[,KEY]", help="keys that clients must send; other users of this machine can see it"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="a file with one key a line")
    group.add_argument(
        "--queue-limit",
        type=count,
        default=32,
        metavar="N",
        help="requests that may wait for the model; further ones are answered 503; default 32",
    )
    group.add_argument(
        "--cors-origins",
        metavar="ORIGIN[,ORIGIN]",
        help="web pages that may call the server, like http://localhost:3000, or *; default: none",
    )
    group.add_argument("-np", "--parallel", type=positive, default=1, metavar="N", help="only 1: one sequence")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.draft_model is None:
        parser.error("-md is needed; with --no-draft the drafter is loaded and not used")
    if args.parallel != 1:
        parser.error("--parallel: a session has one sequence; requests wait in order")
    if (args.prefill_compression != "off") != (args.prefill_drafter is not None):
        parser.error("--prefill-compression auto or always and --prefill-drafter need each other")
    arguments.check(parser, args)


def run(args: argparse.Namespace) -> int:
    """Plan, listen, load, serve until a signal. Returns the exit code."""
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f'the package {name} is missing; install the server with: pip install "laguna-gguf[serve]"'
            )
    from laguna_gguf.http.listening import address, listen
    from laguna_gguf.serve.server import Server
    from laguna_gguf.serve.session import ServedSession
    from laguna_gguf.serve.settings import Limits, Settings

    check_target_file(args.model)
    shared = planned_keywords(args)
    settings = Settings(
        alias=args.alias or Path(args.model).name.removesuffix(".gguf"),
        sampling={
            "temperature": args.temp,
            "top_k": args.top_k,
            "top_p": args.top_p,
            "min_p": args.min_p,
            "repeat_penalty": args.repeat_penalty,
        },
        seed=None if args.seed < 0 else args.seed,
        api_keys=_keys(args),
        cors_origins=tuple(_listed(args.cors_origins)),
        limits=Limits(queue=args.queue_limit),
    )

    def load() -> ServedSession:
        policy = {f"prefill_{name}": value for name, value in policy_keywords(args).items()}
        session = ServedSession(
            args.model,
            args.draft_model,
            draft_max=0 if args.no_draft else args.spec_draft_n_max,
            draft_min=0 if args.no_draft else args.spec_draft_n_min,
            window=args.spec_draft_window,
            spec_synth_len=args.spec_synth_len,
            n_threads=args.threads,
            n_threads_batch=args.threads_batch or args.threads,
            logits_all=args.logits_all,
            verbose=args.verbose,
            pflash=_open_pflash(args),
            **policy,
            **shared,
        )
        if args.spec_synth_len is not None:
            note("SYNTHETIC acceptance: for benchmarks, the answers are not the model's")
        note(f"{settings.alias} is loaded")
        return session

    with listen(args.host, args.port) as listener:
        note(f"listening on {address(listener)}" + ("" if settings.api_keys else ", without an API key"))
        Server(load, settings, access_log=args.verbose).serve_forever(listener)
    return 0


def _open_pflash(args: argparse.Namespace) -> Any:
    if args.prefill_drafter is None:
        return None
    from laguna_gguf.pflash.compress import PFlash

    return PFlash(
        args.prefill_drafter,
        scoring_head=args.scoring_head,
        segment_probe=args.segment_probe,
        target=args.model,
        n_gpu_layers=args.n_gpu_layers,
        n_threads=args.threads,
        n_threads_batch=args.threads_batch or args.threads,
        n_ubatch=args.ubatch_size,
        flash_attn=args.flash_attn == "on",
        verbose=args.verbose,
    )


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    keys = _listed(args.api_key)
    if args.api_key is not None and not keys:
        raise ConfigError("--api-key is empty")
    if args.api_key_file is not None:
        lines = Path(args.api_key_file).read_text("utf-8").splitlines()
        from_file = [line.strip() for line in lines if line.strip()]
        if not from_file:
            raise ConfigError(f"{args.api_key_file} holds no key")
        keys += from_file
    return tuple(keys)


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]
