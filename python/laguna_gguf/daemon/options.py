"""What the command line says, checked."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
from typing import Any

from laguna_gguf.argument_types import count, gpu_layers, port, positive
from laguna_gguf.daemon.loading import Load
from laguna_gguf.daemon.logs import PROGRAM
from laguna_gguf.daemon.model import AUTO, PERSISTENT, REQUEST_SCOPED
from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.arguments import add_drafter, add_policy
from laguna_gguf.pflash.demo import demo_scorer
from laguna_gguf.pflash.settings import SelectionSettings

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `pflash_daemon`."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Prompt compression by a small drafter: as a local service (--socket), in front of llama-server "
        "(--upstream), or on the stdio wire of other runtimes (--stdio). More settings are read from the environment "
        "(PFLASH_...).",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version()}")
    group = parser.add_argument_group("drafter")
    add_drafter(group, "Qwen3.5 or Qwen3-0.6B GGUF; default: the demo drafter of the package")
    group.add_argument("-c", "--ctx-size", type=count, default=0, metavar="N", help="longest prompt; default: any")
    group.add_argument("-ngl", "--gpu-layers", type=gpu_layers, default=0, metavar="N", help="default 0; 'all': all")
    group.add_argument("-t", "--threads", type=positive, metavar="N", help="default: all cores")
    group.add_argument("-ub", "--ubatch-size", type=positive, default=512, metavar="N", help="default 512")
    group.add_argument("-fa", "--flash-attn", choices=("on", "off"), default="off", help="less memory on long inputs")
    group.add_argument(
        "--draft-residency",
        choices=(AUTO, PERSISTENT, REQUEST_SCOPED),
        default=PERSISTENT,
        help="when the drafter's memory is held: always, while somebody waits, or auto: until 5 minutes without a "
        "request. Sessions and views go with it. Default persistent",
    )
    group = parser.add_argument_group("service")
    group.add_argument("--socket", metavar="ADDRESS", help="path of a Unix socket, or tcp://127.0.0.1:PORT")
    group.add_argument("--token-file", metavar="F", help="its first line is what clients of a TCP address must send")
    group = parser.add_argument_group("stdio")
    group.add_argument("--stdio", action="store_true", help="commands on standard input, int32 replies on --stream-fd")
    group.add_argument("--stream-fd", type=count, metavar="N", help="file descriptor for the replies")
    _add_proxy(parser.add_argument_group("proxy"))
    group = parser.add_argument_group("output")
    group.add_argument("--trace", metavar="F", help="append a JSON object for each compression; also PFLASH_TRACE_PATH")
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="of stderr; default text")
    group.add_argument("-v", "--verbose", action="store_true", help="more of it, also llama.cpp's own")
    return parser


def _add_proxy(group: Any) -> None:
    group.add_argument("--upstream", metavar="URL", help="llama-server to stand in front of")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on; default 127.0.0.1")
    group.add_argument("--port", type=port, default=8100, metavar="N", help="default 8100; 0: a free one")
    add_policy(group, "auto")
    group.add_argument(
        "--on-error",
        choices=("fail", "passthrough"),
        default="fail",
        help="what becomes of a request whose prompt cannot be compressed; default fail",
    )
    group.add_argument("--prefill-skip-park", action="store_true", help=argparse.SUPPRESS)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Usage errors that concern several options: exit 2."""
    if not (args.socket or args.stdio or args.upstream):
        parser.error("nothing to do: give --socket, --stdio or --upstream")
    if args.stdio and (args.socket or args.upstream):
        parser.error("--stdio serves the process that started it, and nothing besides")
    if args.stdio and args.stream_fd is None:
        parser.error("--stdio needs --stream-fd")
    if args.socket and args.socket.startswith("tcp://") and not args.token_file:
        parser.error("a TCP address needs --token-file: any user of this machine could connect")


def load_config(args: argparse.Namespace) -> Load:
    """What the model process loads. ConfigError without a drafter."""
    drafter, head, probe = args.prefill_drafter, args.scoring_head, args.segment_probe
    if drafter is None:
        demo = demo_scorer()
        logger.warning("the demo drafter is used: it shows the way, not the quality of Qwen3.5")
        settings = SelectionSettings.from_env(os.environ)
        drafter = str(demo.drafter)
        head = head or settings.scoring_head_gguf or str(demo.scoring_head)
        probe = probe or settings.segment_probe_gguf or str(demo.segment_probe)
    llama: dict[str, Any] = {
        "n_gpu_layers": args.gpu_layers,
        "n_threads": args.threads,
        "n_threads_batch": args.threads,
        "n_batch": args.ubatch_size,
        "n_ubatch": args.ubatch_size,
        "flash_attn": args.flash_attn == "on",
        "verbose": args.verbose,
    }
    if args.ctx_size:
        llama["n_ctx"] = args.ctx_size
    return Load(
        drafter=os.path.abspath(drafter),
        scoring_head=head,
        segment_probe=probe,
        llama=llama,
        trace_path=args.trace,
        log_format=args.log_format,
        verbose=args.verbose,
    )


def has_traces(args: argparse.Namespace) -> bool:
    """Whether compressions are traced. ConfigError for settings that are wrong."""
    return args.trace is not None or SelectionSettings.from_env(os.environ).trace_path is not None


def read_token(file: str | None) -> str | None:
    """The first line of a token file. ConfigError when it is empty or not there."""
    if file is None:
        return None
    try:
        with open(file, encoding="utf-8") as stream:
            token = stream.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"the first line of {file} is empty; needed the token")
    return token


def version() -> str:
    """Of the package."""
    return importlib.metadata.version("laguna-gguf")
