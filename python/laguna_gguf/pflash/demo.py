"""The demo drafter of the package: constructed and briefly trained, it says nothing of Qwen3.5's quality."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from laguna_gguf.errors import CheckpointError


@dataclass(frozen=True)
class DemoScorer:
    """Paths of a drafter and of the head and probe that belong to it."""

    drafter: Path
    scoring_head: Path
    segment_probe: Path

    @classmethod
    def in_folder(cls, folder: Path) -> DemoScorer:
        """The three under their usual names; they need not exist."""
        return cls(*(folder / f"demo-scorer-{part}.gguf" for part in ("q8_0", "head", "probe")))

    @property
    def exists(self) -> bool:
        return all(path.is_file() for path in (self.drafter, self.scoring_head, self.segment_probe))


def demo_scorer() -> DemoScorer:
    """The files inside the package, for `PFlash(demo.drafter, scoring_head=..., segment_probe=...)`.

    CheckpointError when the package was built without them.
    """
    found = DemoScorer.in_folder(Path(str(files("laguna_gguf") / "data")))
    if not found.exists:
        raise CheckpointError("this package has no demo drafter; give a Qwen3.5 GGUF of your own")
    return found
