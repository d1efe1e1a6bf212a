"""Frames between clients, the daemon's front and its model process.

A frame is its length (4 bytes, little-endian, these not counted) and one MessagePack map, whose key `type` names one
of the structs below. A connection begins with Hello and Welcome. Requests have ids of the client's choosing; replies
carry them and may come in any order. Token ids and spans travel as bytes: int32, little-endian; a span is two of them.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from laguna_gguf import errors
from laguna_gguf.errors import DaemonError, LagunaError, ProtocolError, SelectionError

VERSION = 1

MAX_FRAME_BYTES = 64 << 20
"""Longest frame in either direction."""
MAX_HELLO_BYTES = 4096
"""Longest frame from a client that has not been let in."""
MAX_REQUEST_TOKENS = 1 << 20
MAX_REQUIRED = 64
MAX_HISTORY = 64
MAX_NAME_BYTES = 1024
"""Session names and tokens."""
MAX_SECONDS = 24 * 3600.0
"""Longest deadline."""

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size

Span = tuple[int, int]


class Frame(msgspec.Struct, tag_field="type", tag=str.lower, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all frames."""


class Hello(Frame):
    """First frame of a client."""

    version: int
    token: str | None = None
    """Secret of a TCP address."""


class Welcome(Frame):
    """Answer to it, once the drafter is loaded."""

    version: int
    server: str
    architecture: str
    drafter_sha256: str
    head_sha256: str | None = None
    probe_sha256: str | None = None


class Request(Frame, kw_only=True):
    """Base of what the model process answers."""

    id: int
    seconds: float | None = None
    """Deadline, from when the front has the request."""
    settings: dict[str, Any] | None = None
    """Fields of SelectionSettings that replace the daemon's; see `child.REQUEST_SETTINGS`."""
    trace: bool = False


class Compress(Request, tag="compress"):
    """PFlash.compress; either text or ids."""

    keep_ratio: float
    text: str | None = None
    ids: bytes | None = None
    query: Span | None = None
    required: list[Span] = []
    history: list[Span] = []
    session: str | None = None
    suffix_candidates: bool = False


class CompressChat(Request, tag="compress_chat"):
    """PFlash.compress_chat."""

    rendered_prompt: str
    keep_ratio: float
    session: str | None = None
    pflash_query: str | None = None
    pflash_required: list[str] = []
    compression: str = "always"
    threshold: int = 32000
    target_n_ctx: int | None = None
    max_tokens: int = 0
    count: bool = False
    """Whether the front counts target tokens while the process works; not for clients."""


class Cancel(Frame):
    """Nobody waits for this request any more; it gets no reply."""

    id: int


class Stats(Frame):
    """What has the daemon done?"""

    id: int


class StatsReply(Frame, tag="stats_reply"):
    id: int
    stats: dict[str, Any]


class Result(Frame):
    """What Compressed holds."""

    id: int
    ids: bytes
    spans: bytes
    text: str
    budget: int
    retained_tokens: int
    stop_reason: str
    retained_mass: float
    timings: dict[str, Any]
    trace: bytes | None = None
    """JSON, as a line of PFLASH_TRACE_PATH."""
    byte_spans: bytes | None = None
    """As spans, of a chat's bytes."""
    inserted: list[tuple[int, str]] = msgspec.field(default_factory=list)
    ceiling: int | None = None


class Error(Frame):
    """A request failed; without an id the connection did, which then ends."""

    code: str
    message: str
    id: int | None = None
    stop_reason: str | None = None


ClientFrame = Compress | CompressChat | Cancel | Stats
ServerFrame = Result | StatsReply | Error

_CLASSES = {
    "config": errors.ConfigError,
    "checkpoint": errors.CheckpointError,
    "target_mismatch": errors.TargetMismatchError,
    "decode": errors.DecodeError,
    "out_of_memory": errors.OutOfMemoryError,
    "scorer": errors.ScorerError,
    "query": errors.QueryError,
    "budget": errors.BudgetError,
    "protocol": errors.ProtocolError,
}
_CODES = {kind: code for code, kind in _CLASSES.items()}

BUSY, CANCELLED, DEADLINE, DRAFTER_LOST, ENDING, INTERNAL, UNAUTHORIZED = (
    "busy",
    "cancelled",
    "deadline",
    "drafter_lost",
    "ending",
    "internal",
    "unauthorized",
)
"""Codes that are a DaemonError for the client."""


class CodedError(DaemonError):
    """A DaemonError with its code on the wire."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: value.item())  # numpy's numbers


def encode(frame: Frame) -> bytes:
    """A whole frame. ProtocolError when it is too long."""
    try:
        body = _encoder.encode(frame)
    except (
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        RecursionError,
    ) as error:  # also text with half a surrogate pair
        raise ProtocolError(f"cannot be sent: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes is too long to send; at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


def length(header: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Length of the body behind a header. ProtocolError when it is empty or longer than the limit."""
    (size,) = _LENGTH.unpack(header)
    if not 0 < size <= limit:
        raise ProtocolError(f"a frame announces {size} bytes; needed 1 to {limit}")
    return size


def decoder(kind: Any) -> msgspec.msgpack.Decoder:
    """Decodes bodies to a struct or a union of them."""
    return msgspec.msgpack.Decoder(kind)


def decode(body: bytes | bytearray, using: msgspec.msgpack.Decoder) -> Any:
    """A frame of its body. ProtocolError for anything that is none."""
    try:
        return using.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a frame: {error}") from error


def check(frame: Compress | CompressChat) -> None:
    """ProtocolError for a request beyond the limits; its meaning is checked where it is worked on."""
    if frame.seconds is not None and not 0 < frame.seconds <= MAX_SECONDS:
        raise ProtocolError(f"the deadline is {frame.seconds} s; needed more than 0, at most {MAX_SECONDS:g}")
    if frame.session is not None and len(frame.session) > MAX_NAME_BYTES:
        raise ProtocolError(f"the session's name has {len(frame.session)} characters; at most {MAX_NAME_BYTES}")
    if isinstance(frame, CompressChat):
        if frame.count:
            raise ProtocolError("count is not for clients")
        if len(frame.pflash_required) > MAX_REQUIRED:
            raise ProtocolError(f"{len(frame.pflash_required)} required texts; at most {MAX_REQUIRED}")
        return
    if (frame.text is None) == (frame.ids is None):
        raise ProtocolError("a request has either text or ids")
    if frame.ids is not None and (len(frame.ids) % 4 or len(frame.ids) // 4 > MAX_REQUEST_TOKENS):
        raise ProtocolError(
            f"ids are {len(frame.ids)} bytes; needed int32 values, at most {MAX_REQUEST_TOKENS} of them"
        )
    if len(frame.required) > MAX_REQUIRED or len(frame.history) > MAX_HISTORY:
        raise ProtocolError(f"at most {MAX_REQUIRED} required and {MAX_HISTORY} history spans are taken")


def error_frame(error: BaseException, request: int | None = None) -> Error:
    """The frame that tells a client about an error. Unexpected ones are not described: they may name files."""
    if isinstance(error, SelectionError):
        return Error("selection", str(error), request, error.stop_reason)
    if isinstance(error, CodedError):
        return Error(error.code, str(error), request)
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    if code is not None:
        return Error(code, str(error), request)
    if isinstance(error, LagunaError):
        return Error(INTERNAL, str(error), request)
    return Error(INTERNAL, f"{type(error).__name__} in the daemon; its log says more", request)


def exception(frame: Error) -> LagunaError:
    """The exception that a client raises for an error frame."""
    if frame.code == "selection":
        return SelectionError(frame.message, frame.stop_reason or "")
    kind = _CLASSES.get(frame.code)
    return CodedError(frame.message, frame.code) if kind is None else kind(frame.message)
