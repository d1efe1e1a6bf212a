"""Which scorers a drafter and its settings call for, and a prompt read by them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.llama import LlamaModel
from laguna_gguf.pflash.llama_options import LlamaOptions
from laguna_gguf.pflash.probe import SegmentProbe
from laguna_gguf.pflash.running_max import RunningMaxScorer
from laguna_gguf.pflash.scorer import Progress, Scorer, Scores, check_request
from laguna_gguf.pflash.settings import SelectionSettings
from laguna_gguf.pflash.trunk import Trunk


@dataclass(frozen=True)
class Reading:
    """A prompt's scores."""

    ranking: Scores
    """Those that rank the candidates, in a split those that rank first."""
    second: Scores | None
    """Importance of the all-layer scorer that ranks second in a split."""
    probed: Scores | None
    """Those that hold the segment probe's scores."""

    @property
    def forward_ms(self) -> float:
        """Time in the drafter's blocks, all scorers together."""
        return sum({id(s): s.forward_ms for s in (self.ranking, self.second, self.probed) if s is not None}.values())


class Scorers:
    """The scorers of one loaded drafter."""

    def __init__(
        self,
        path: str,
        settings: SelectionSettings,
        *,
        head: str | os.PathLike[str] | None,
        probe: str | os.PathLike[str] | None,
        n_sessions: int,
        llama_kwargs: dict[str, Any],
    ) -> None:
        """ConfigError, CheckpointError, TargetMismatchError: see `PFlash`."""
        self.kind = settings.select_scorer
        if settings.qwen35_legacy_scorer and self.kind == "head":
            self.kind = "legacy"
        if settings.select_segments == "probe" and probe is None:
            raise ConfigError(
                "PFLASH_SELECT_SEGMENTS is probe and no segment probe is given; set PFLASH_SEGMENT_PROBE_GGUF or "
                "segment_probe, or take auto"
            )
        if settings.select_segments == "fixed":
            probe = None
        options = LlamaOptions.from_keywords(llama_kwargs)
        file = DrafterFile(path)
        self.strict = file.arch != "qwen3" or settings.select_mode is not None
        """Whether candidates are selected strictly; else by the legacy chunk selection of Qwen3-0.6B."""
        if not self.strict:
            self.kind = "legacy"
        self.model = LlamaModel(path, options)
        self.head: Scorer | None = None
        self.legacy: RunningMaxScorer | None = None
        if self.kind != "legacy" or head is not None or probe is not None:
            trunk = Trunk(path, n_sequences=n_sessions + 1, model=self.model)
            self.head = Scorer(trunk, head=head, probe=probe)
        if self.kind != "head":
            self.legacy = RunningMaxScorer(file, self.model)

    @property
    def probe(self) -> SegmentProbe | None:
        return None if self.head is None else self.head.probe

    def close(self) -> None:
        if self.head is not None:
            self.head.close()
        if self.legacy is not None:
            self.legacy.close()
        self.model.close()

    def read(
        self,
        ids: NDArray[np.int32],
        *,
        query: Sequence[int],
        windows: Iterable[Sequence[Any]] = (),
        session: str | None = None,
        suffix_candidates: bool = False,
        progress: Progress | None = None,
    ) -> Reading:
        """Scores of checked ids. The all-layer scorer looks from the query only."""
        windows = check_request(ids, query, windows, suffix_candidates).windows[1:]
        head, legacy = None, None
        if self.head is not None and (self.kind != "legacy" or self.probe is not None):
            head = self.head.score(
                ids,
                query=query,
                windows=windows,
                session=session,
                suffix_candidates=suffix_candidates,
                progress=progress,
            )
        if self.legacy is not None:
            legacy = self.legacy.score(ids, query=query, progress=progress)
        ranking = legacy if self.kind == "legacy" else head
        assert ranking is not None
        probed = head if head is not None and head.probe is not None else None
        return Reading(ranking, legacy if self.kind == "split" else None, probed)
