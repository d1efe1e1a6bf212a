"""Grammars of requests: GBNF as it came, or made from a JSON schema. The session checks that llama.cpp parses it."""

from __future__ import annotations

import json

from llama_cpp.llama_grammar import JSON_GBNF, json_schema_to_gbnf

from laguna_gguf.errors import RequestError
from laguna_gguf.serve.requests import Constraint
from laguna_gguf.serve.settings import Limits


def grammar_text(constraint: Constraint, limits: Limits) -> str:
    """GBNF within the limits. Raises RequestError."""
    grammar = _of_schema(constraint) if constraint.grammar is None else constraint.grammar
    if len(grammar.encode()) > limits.grammar_bytes:
        raise RequestError(f"{constraint.origin}: the grammar is larger than {limits.grammar_bytes} bytes")
    if "\0" in grammar:
        raise RequestError(f"{constraint.origin}: a grammar cannot hold null characters")
    return grammar


def _of_schema(constraint: Constraint) -> str:
    assert constraint.schema is not None
    if not json.loads(constraint.schema):
        return JSON_GBNF
    try:
        return json_schema_to_gbnf(constraint.schema)
    except Exception as error:  # the converter asserts, and raises whatever a schema makes it run into
        reason = str(error) or type(error).__name__
        raise RequestError(
            f"{constraint.origin}: the schema cannot be turned into a grammar: {reason[:300]}"
        ) from error
