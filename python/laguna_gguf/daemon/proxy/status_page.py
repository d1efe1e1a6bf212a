"""The page at /pflash: state, last compressions, and the trace of each. Nothing from elsewhere."""

from __future__ import annotations

import html
import time
import zlib

from starlette.responses import HTMLResponse, Response

from laguna_gguf.daemon.model import Model
from laguna_gguf.daemon.proxy.history import Entry, History
from laguna_gguf.http import errors
from laguna_gguf.http.responses import error_response, json_response
from laguna_gguf.pflash.trace import parse_trace
from laguna_gguf.pflash.trace_report import report

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}

TRACE_HEADERS = HEADERS | {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
}

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif;
  --line: color-mix(in srgb, currentColor 15%, transparent) }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem; font-weight: 600 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .6rem;
  border-bottom: 1px solid var(--line) }
th { font-weight: 500; opacity: .7 }
th:first-child, td:first-child, .text { text-align: left }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .8rem; margin: 1.2rem 0 }
dt { opacity: .7; font-size: .85rem } dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums }
.bar { display: inline-block; width: 6rem; height: .6rem; border-radius: .3rem;
  background: var(--line) }
.bar i { display: block; height: 100%; border-radius: .3rem; background: #2a7de1 }
@media (max-width: 45rem) { .path, .view { display: none } .bar { width: 2.5rem } th, td { padding: .3rem .2rem } }
.note { opacity: .7; font-size: .85rem }
.none { opacity: .7; padding: 2rem 0 }
"""


_NOTE = (
    '<p class="note">Saved: an estimate. The tokens that the server behind did not have to read, at the speed of its '
    "own prompt timings, less the time that compressing took. What its cache would have held is not counted.</p>"
)


def respond(path: str, history: History, model: Model) -> Response:
    """The page, or with a number behind it one compression: its trace's page, or its numbers as JSON."""
    rest = path.removeprefix("/pflash").strip("/")
    if not rest:
        return HTMLResponse(page(history, model), headers=HEADERS)
    entry = history.find(int(rest)) if rest.isascii() and rest.isdecimal() and len(rest) < 16 else None
    if entry is None:
        return error_response(errors.of_status(404, f"there is no {path[:200]} here"))
    if entry.trace is not None:
        trace = parse_trace(zlib.decompress(entry.trace), f"compression {entry.number}")
        return HTMLResponse("".join(report([trace], f"Compression {entry.number}")), headers=TRACE_HEADERS)
    return json_response(
        {
            "number": entry.number,
            "when": entry.when,
            "path": entry.path,
            "prompt_tokens": entry.prompt_tokens,
            "served_tokens": entry.served_tokens,
            "read_tokens": entry.read_tokens,
            "saved_ms": history.saved_ms(entry),
            "timings": entry.timings,
        }
    )


def page(history: History, model: Model) -> str:
    """The page as HTML."""
    stats = model.stats()
    entries = list(history)
    saved = [ms for entry in entries if (ms := history.saved_ms(entry)) is not None]
    before, after = sum(e.prompt_tokens for e in entries), sum(e.served_tokens for e in entries)
    facts = {
        "drafter": stats["state"],
        "waiting": stats["waiting"],
        "restarts": stats["restarts"],
        "compressed": stats["completed"],
        "last prompts": f"{before:,} tokens",
        "sent of them": f"{after:,} ({after / before:.1%})" if before else "0",
        "time saved": _seconds(sum(saved) if saved else None),
    }
    shown = "".join(f"<div><dt>{name}</dt><dd>{html.escape(str(value))}</dd></div>" for name, value in facts.items())
    rows = "".join(_row(entry, history.saved_ms(entry)) for entry in entries)
    table = (
        "<table><thead><tr><th>when</th><th class='text path'>path</th><th>prompt</th><th>sent</th><th class=text></th>"
        "<th>compressed in</th><th>saved</th><th class='text view'>view</th><th>details</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>{_NOTE}"
        if entries
        else '<p class="none">No prompt was long enough yet.</p>'
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>pflash</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>Prompt compression</h1><dl>{shown}</dl>{table}</body></html>"
    )


def _seconds(ms: float | None) -> str:
    return "–" if ms is None else f"{ms / 1e3:,.2f} s"


def _row(entry: Entry, saved_ms: float | None) -> str:
    share = entry.served_tokens / max(1, entry.prompt_tokens)
    view = (entry.timings.get("view") or {}).get("mode", "")
    when = time.strftime("%H:%M:%S", time.localtime(entry.when))
    return (
        f"<tr><td>{when}</td><td class='text path'>{html.escape(entry.path)}</td><td>{entry.prompt_tokens:,}</td>"
        f"<td>{entry.served_tokens:,}</td>"
        f'<td class=text><span class=bar><i style="width:{min(1.0, share):.1%}"></i></span> {share:.0%}</td>'
        f"<td>{_seconds(entry.timings['compress_ms'])}</td><td>{_seconds(saved_ms)}</td>"
        f"<td class='text view'>{html.escape(str(view))}</td>"
        f'<td><a href="/pflash/{entry.number}">{entry.number}</a></td></tr>'
    )
