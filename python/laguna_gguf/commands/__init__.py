"""The subcommands of `laguna-gguf`: one module each, with `add_parser` and `run`."""
