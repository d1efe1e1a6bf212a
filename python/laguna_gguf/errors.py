"""Every exception of the package.

Each is a `LagunaError` and also the builtin that fits, so that code written for
`llama_cpp.Llama` (which raises ValueError and RuntimeError) keeps working.
"""


class LagunaError(Exception):
    """Base of every error this package raises."""


class ConfigError(LagunaError, ValueError):
    """A setting, argument or configuration field is not one that works."""


class CheckpointError(LagunaError, ValueError):
    """A model file or checkpoint directory is damaged, incomplete or of another kind."""


class TargetMismatchError(LagunaError, ValueError):
    """Drafter and target do not belong together, or no target is bound."""


class CaptureError(LagunaError, RuntimeError):
    """The target's hidden states could not be captured completely."""


class DecodeError(LagunaError, RuntimeError):
    """llama.cpp refused or failed to evaluate tokens."""


class UnsupportedError(LagunaError, NotImplementedError):
    """Something that llama_cpp.Llama does and a speculative session does not; NotImplementedError is a RuntimeError."""


class SessionBusyError(LagunaError, RuntimeError):
    """A generator was continued after another call had taken over its session."""


class RollbackError(LagunaError, RuntimeError):
    """A state cannot be taken back (or continued) where the caller asked."""


class OutOfMemoryError(LagunaError, MemoryError):
    """A device has no room for what was asked; nothing was changed."""


class ScorerError(LagunaError, RuntimeError):
    """The prompt scorer failed."""


class SelectionError(LagunaError, ValueError):
    """The selector was asked for something impossible; `stop_reason` says what."""

    def __init__(self, message: str, stop_reason: str) -> None:
        super().__init__(message)
        self.stop_reason = stop_reason


class QueryError(LagunaError, ValueError):
    """No usable query could be found in a prompt."""


class BudgetError(LagunaError, ValueError):
    """A token budget cannot be met."""


class ProtocolError(LagunaError, ValueError):
    """A frame or message does not follow the protocol."""


class DaemonError(LagunaError, RuntimeError):
    """The daemon is absent, died or refused."""


class RequestError(LagunaError, ValueError):
    """A request to the server cannot be answered: an HTTP status and an error type as llama-server has them."""

    def __init__(
        self, message: str, status: int = 400, kind: str = "invalid_request_error", **details: int | str
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.details = details
        """Further fields of the error object."""
