"""The `pflash_daemon` command. Exit codes: 0 ended as asked, 1 refused or failed, 2 usage."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Sequence

from laguna_gguf.daemon import options
from laguna_gguf.daemon.logs import PROGRAM, configure
from laguna_gguf.daemon.model import LoadError
from laguna_gguf.errors import ConfigError, LagunaError

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    parser = options.build_parser()
    args = parser.parse_args(argv)
    options.check(parser, args)
    configure(args.log_format, verbose=args.verbose)
    try:
        if args.stdio:
            from laguna_gguf.daemon.stdio import serve

            return serve(args)
        if args.upstream:
            _check_packages()
        from laguna_gguf.daemon.front import run

        return asyncio.run(run(args))
    except KeyboardInterrupt:
        return 130
    except (LagunaError, LoadError, OSError) as error:
        logger.debug("failed", exc_info=True)
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1


def _check_packages() -> None:
    for name in ("starlette", "uvicorn", "httpx", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f'the package {name} is missing; install the daemon with: pip install "laguna-gguf[daemon]"'
            )


if __name__ == "__main__":
    sys.exit(main())
