"""Other people's drafting on the same target and prompts: llama_cpp's prompt lookup, llama-server's n-grams."""

from __future__ import annotations

import importlib.util
import json
import secrets
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from laguna_gguf.bench.engines import CountingLookup, LookupEngine, Run, same_model
from laguna_gguf.errors import LagunaError

SERVER_TYPES = ("none", "ngram-simple")
"""Values of llama-server's --spec-type that are compared: plain decoding, and its n-gram drafting without a model."""

LOOKUP_DRAFTS = 10
"""llama_cpp's default."""

_PROGRAM = Path(__file__).with_name("llama_server.py")
_TIMEOUT = 3600.0  # seconds for one request; a large model on a small machine takes long


def check_xllamacpp() -> None:
    """Raise LagunaError when the optional package is missing."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise LagunaError(
            "--compare needs the xllamacpp package for llama-server's n-gram drafting; install it with: "
            "pip install 'laguna-gguf[compare]'"
        )


def make_lookup(owner: llama_cpp.Llama, path: str, temperature: float, keywords: dict[str, Any]) -> LookupEngine:
    """Prompt lookup on the model of `owner`. llama_cpp keeps n_ctx x n_vocab float32 scores for it."""
    lookup = CountingLookup(LOOKUP_DRAFTS)
    with same_model(owner):
        return LookupEngine(llama_cpp.Llama(path, draft_model=lookup, **keywords), lookup, temperature)


class ServerEngine:
    """llama-server in a process of its own; close() ends it."""

    plain = False  # another build of llama.cpp: not what a session is compared with
    synthetic = False

    def __init__(self, path: str, spec_type: str, temperature: float, keywords: dict[str, Any]) -> None:
        """Load `path` with Llama's keywords. Raises LagunaError with the server's last words when it cannot."""
        self._temperature = temperature
        self._key = secrets.token_urlsafe(16)
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # a pipe that nobody reads would fill up and block
        names = (
            "n_ctx",
            "n_batch",
            "n_ubatch",
            "n_threads",
            "n_gpu_layers",
            "type_k",
            "type_v",
            "flash_attn",
            "swa_full",
        )
        settings = {name: keywords[name] for name in names}
        settings |= {"path": path, "speculative": spec_type, "api_key": self._key}
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._address, self.version = self._read_start()
        self.name = f"llama-server (xllamacpp {self.version}), {spec_type}"
        self.label = "llama-server" if spec_type == "none" else f"llama-server {spec_type}"

    def generate(self, prompt: Sequence[int], n: int, seed: int = 0) -> Run:
        """As `Engine.generate`. The server does not count rounds; they follow from accepted drafts."""
        body = {
            "prompt": list(prompt),
            "n_predict": n,
            "temperature": self._temperature,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": seed,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        answer = self._post("/completion", body)
        timings, tokens = answer["timings"], answer["tokens"]
        accepted = timings.get("draft_n_accepted", 0)
        return Run(tokens, timings["predicted_ms"], len(tokens) - 1 - accepted, timings.get("draft_n", 0), accepted)

    def close(self) -> None:
        """End the process; a second call does nothing."""
        if self._process.poll() is None:
            self._process.communicate()  # closes its standard input, for which it waits
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def _read_start(self) -> tuple[str, str]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            self._process.wait()
            self._log.seek(0)
            last = [text.strip() for text in self._log.read().splitlines() if text.strip()][-1:]
            self.close()
            raise LagunaError(f"llama-server of xllamacpp did not start: {''.join(last) or 'it said nothing'}")
        start = json.loads(line)
        return start["address"], start["version"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                return json.load(response)
        except (urllib.error.URLError, OSError) as error:
            raise LagunaError(f"llama-server did not answer: {error}") from error
