"""PFlash: prompt compression by the attention of a small drafter."""

from laguna_gguf.pflash.demo import DemoScorer, demo_scorer

__all__ = ["DemoScorer", "demo_scorer"]
