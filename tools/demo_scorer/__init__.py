"""The demo drafter of prompt compression: a constructed Qwen3.5 trunk with a small tokenizer of its own."""
