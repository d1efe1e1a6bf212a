"""`laguna-gguf bench`: speed with and without drafts, acceptance by kind of text, and an identity check.

engines.py runs a prompt one way and times it; measure.py interleaves the ways; rows.py turns times into figures;
report.py prints them. check.py is `bench --check`, costs.py the cost of a round by its parts, upstream.py the drafting
of llama_cpp and llama-server.
"""
