"""What the commands print: terminal detection, streamed text with accepted drafts marked, tables."""

import codecs
import json
import sys
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from laguna_gguf.devices import Device
from laguna_gguf.memory_plan import MemoryPlan

PROGRAM = "laguna-gguf"

_DRAFTED = "\x1b[4;32m"  # underlined green
_DRAFTED_NO_COLOR = "\x1b[4m"
_RESET = "\x1b[0m"
# A model can write escape sequences too; a terminal must not obey them.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def console(stream: TextIO, color: str = "auto") -> Console:
    """A console on `stream`; `color` is "auto" (terminals only, NO_COLOR respected), "on" or "off"."""
    force = {"auto": None, "on": True, "off": False}[color]
    return Console(file=stream, force_terminal=force, highlight=False)


def note(message: str) -> None:
    """One line on stderr."""
    print(f"{PROGRAM}: {one_line(message)}", file=sys.stderr, flush=True)


def one_line(message: str) -> str:
    """`message` with line breaks and runs of blanks collapsed."""
    return " ".join(message.split())


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value), flush=True)


def size(n_bytes: int) -> str:
    """Bytes for people: "15.6 MiB"."""
    value, unit = float(n_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{n_bytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


class TokenWriter:
    """Writes pieces of UTF-8 text as they come, never half a character; pieces that were drafted are marked.

    `stream` None collects the text only. Marks are terminal escapes and appear only where `color` allows them.
    """

    def __init__(self, stream: TextIO | None, color: str = "auto") -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._mark = ""
        self._is_terminal = stream is not None and stream.isatty()
        if stream is not None and color != "off":
            terminal = console(stream, color)
            if terminal.is_terminal and not terminal.is_dumb_terminal and not terminal.legacy_windows:
                self._mark = _DRAFTED_NO_COLOR if terminal.no_color else _DRAFTED
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything written so far."""
        return "".join(self._pieces)

    @property
    def marks(self) -> bool:
        """Whether drafted pieces look different."""
        return bool(self._mark)

    def write(self, piece: bytes, drafted: bool = False) -> None:
        self._emit(self._decode(piece), drafted)

    def close(self) -> None:
        """Write what is left of an incomplete character."""
        self._emit(self._decode(b"", True), False)

    def _emit(self, text: str, drafted: bool) -> None:
        if not text:
            return
        self._pieces.append(text)
        if self._is_terminal:
            text = text.translate(_CONTROLS)
        if self._stream is not None:
            self._stream.write(f"{self._mark}{text}{_RESET}" if drafted and self._mark else text)
            self._stream.flush()


def device_line(device: Device) -> str:
    """One device in one line: "CPU (AMD EPYC), cpu, 21.3 GiB of 23.5 GiB free"."""
    memory = f", {size(device.free)} of {size(device.total)} free" if device.total else ""
    return f"{device.name} ({device.description}), {device.kind}{memory}"


def print_plan(plan: MemoryPlan) -> None:
    """The plan as a table on stderr, then a warning for each device where it does not fit."""
    table = Table(
        title=f"memory plan, context {plan.n_ctx}",
        box=SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading, justify in (("", "left"), ("", "left"), ("device", "left"), ("size", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for item in plan.items:
        table.add_row(item.part, item.detail, item.device, size(item.n_bytes))
    devices = {device.name: device for device in plan.devices}
    for name, n_bytes in plan.needed().items():
        device = devices.get(name)
        free = f"{size(device.free)} free" if device is not None and device.total else "free memory unknown"
        table.add_row("total", free, name, size(n_bytes), style="bold")
    console(sys.stderr).print(table)
    for name, n_bytes in plan.shortfalls().items():
        note(
            f"warning: the plan exceeds the free memory of {name} by {size(n_bytes)}; loading may fail or swap "
            "(a smaller -c, -ub or -ngl, or -fa on, needs less)"
        )
