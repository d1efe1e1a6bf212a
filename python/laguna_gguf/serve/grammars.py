"""Grammars of requests: schemas become GBNF, and llama.cpp sees only text that it parses.

llama.cpp answers a grammar that it cannot parse with a null pointer that the sampler chain would follow.
"""

from __future__ import annotations

import json
import re
from typing import Any

import llama_cpp
from llama_cpp.llama_grammar import JSON_GBNF, json_schema_to_gbnf

from laguna_gguf.errors import RequestError
from laguna_gguf.serve.requests import Constraint
from laguna_gguf.serve.settings import Limits

_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*')
"""Parts of a grammar in which parentheses mean themselves."""


def grammar_text(constraint: Constraint, vocabulary: Any, limits: Limits) -> str:
    """GBNF that llama.cpp has parsed once. `vocabulary` is a llama_vocab pointer. Raises RequestError."""
    grammar = constraint.grammar
    if grammar is None:
        grammar = _of_schema(constraint)
    if len(grammar.encode()) > limits.grammar_bytes:
        raise RequestError(f"{constraint.origin}: its grammar would be larger than {limits.grammar_bytes} bytes")
    if "\0" in grammar:
        raise RequestError(f"{constraint.origin}: a grammar cannot hold null characters")
    if _depth(grammar) > limits.grammar_depth:
        raise RequestError(f"{constraint.origin}: parentheses nest deeper than {limits.grammar_depth} levels")
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, grammar.encode(), b"root")
    if not sampler:
        raise RequestError(f"{constraint.origin}: llama.cpp cannot parse the grammar (GBNF with a rule named root)")
    llama_cpp.llama_sampler_free(sampler)
    return grammar


def _of_schema(constraint: Constraint) -> str:
    assert constraint.schema is not None
    if not json.loads(constraint.schema):
        return JSON_GBNF
    try:
        return json_schema_to_gbnf(constraint.schema)
    except RequestError:
        raise
    except Exception as error:  # the converter asserts and raises whatever a schema makes it run into
        reason = str(error) or type(error).__name__
        raise RequestError(
            f"{constraint.origin}: the schema cannot be turned into a grammar: {reason[:300]}"
        ) from error


def _depth(grammar: str) -> int:
    deepest = depth = 0
    for character in _QUOTED.sub("", grammar):
        if character == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif character == ")":
            depth -= 1
    return deepest
