"""PFlash: prompt compression by the attention of a small drafter."""
