"""What speculative decoding did: counters kept while it runs, and the snapshot that users read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class SpecStats:
    """Counts and times since the session was made or `reset_stats()` was called. Times in ms."""

    rounds: int
    """Verify rounds (target passes after the prompt)."""
    generated_tokens: int
    """Tokens produced by rounds: the one sampled from the prompt is not among them."""
    drafted_tokens: int
    accepted_tokens: int
    mean_accepted_length: float
    """tau = generated_tokens / rounds; 0.0 before the first round."""
    acceptance_rate: float
    """accepted_tokens / drafted_tokens; 0.0 before the first draft."""
    accepted_by_depth: tuple[int, ...]
    """[i] = rounds in which at least i+1 drafts were accepted."""
    prompt_ms: float
    capture_ms: float
    """Copying hidden rows and updating the drafter's context, in rounds."""
    draft_ms: float
    verify_ms: float
    """Target decodes of rounds, capture taken out."""
    sample_ms: float
    other_ms: float
    """The rest of the rounds' time; time spent by the consumer of the tokens is not in it."""
    tokens_per_second: float
    """generated_tokens by the rounds' time."""
    plain_rounds: int
    """Rounds without a draft."""
    nonfinite_features: int
    """Hidden values of the target that were not finite and were taken as 0."""
    draft_max_now: int

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for json."""
        return {**asdict(self), "accepted_by_depth": list(self.accepted_by_depth)}


@dataclass
class Counters:
    """Mutable counters behind SpecStats."""

    rounds: int = 0
    plain_rounds: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    prompt_ms: float = 0.0
    capture_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    round_ms: float = 0.0
    nonfinite_before: int = 0

    def count_accepted(self, depth: int) -> None:
        """One more round whose draft number `depth` (0-based) was accepted."""
        while len(self.accepted_by_depth) <= depth:
            self.accepted_by_depth.append(0)
        self.accepted_by_depth[depth] += 1

    def snapshot(self, *, nonfinite: int, draft_max_now: int) -> SpecStats:
        accepted = sum(self.accepted_by_depth)
        known = self.capture_ms + self.draft_ms + self.verify_ms + self.sample_ms
        return SpecStats(
            rounds=self.rounds,
            generated_tokens=self.generated_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=accepted,
            mean_accepted_length=self.generated_tokens / self.rounds if self.rounds else 0.0,
            acceptance_rate=accepted / self.drafted_tokens if self.drafted_tokens else 0.0,
            accepted_by_depth=tuple(self.accepted_by_depth),
            prompt_ms=self.prompt_ms,
            capture_ms=self.capture_ms,
            draft_ms=self.draft_ms,
            verify_ms=self.verify_ms,
            sample_ms=self.sample_ms,
            other_ms=max(self.round_ms - known, 0.0),
            tokens_per_second=self.generated_tokens / self.round_ms * 1e3 if self.round_ms else 0.0,
            plain_rounds=self.plain_rounds,
            nonfinite_features=nonfinite - self.nonfinite_before,
            draft_max_now=draft_max_now,
        )
