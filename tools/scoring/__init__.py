"""Training of scoring heads and segment probes on a frozen drafter."""
