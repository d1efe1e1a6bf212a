"""Parts of tools/fuzz_gguf.py: sound files to start from, ways to damage them, and the process that reads them."""
