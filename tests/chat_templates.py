"""Chat templates with the true control markers of four families, and tokenizers that cut their text anywhere.

The templates are written for these tests: short, with the structures of the published ones (where tools, tool output
and thinking go). A message is a dict with role and content; an assistant may have `call`, the text of a tool call.
"""

import random
import re
from collections.abc import Callable

import jinja2

DEEPSEEK = """
{{- '<｜begin▁of▁sentence｜>' -}}
{%- for m in messages if m.role == 'system' -%}{{ m.content }}{%- endfor -%}
{%- if tools %}{{ '\n\n## Tools\n' + tools }}{% endif -%}
{%- set ns = namespace(open=false) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{ '<｜User｜>' + m.content }}{%- set ns.open = true -%}
  {%- elif m.role == 'tool' and results_in_user_turns -%}
    {{ '<｜User｜><tool_result>' + m.content + '</tool_result>' }}{%- set ns.open = true -%}
  {%- elif m.role == 'tool' -%}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
  {%- elif m.role == 'assistant' -%}
    {%- if ns.open %}{{ '<｜Assistant｜></think>' }}{% endif -%}
    {{ m.content }}
    {%- if m.call %}{{ '<｜tool▁calls▁begin｜>' + m.call + '<｜tool▁calls▁end｜>' }}{% endif -%}
    {{ '<｜end▁of▁sentence｜>' }}{%- set ns.open = false -%}
  {%- endif -%}
{%- endfor -%}
{%- if generate and ns.open %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif -%}
"""

QWEN = """
{%- if tools and not tools_turn and messages[0].role != 'system' -%}
  {{ '<|im_start|>system\n# Tools\n<tools>\n' + tools + '\n</tools><|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
    {{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}
  {%- else -%}
    {{ '<|im_start|>' + m.role + '\n' + m.content }}
    {%- if m.call %}{{ '\n<tool_call>\n' + m.call + '\n</tool_call>' }}{% endif -%}
    {%- if m.role == 'system' and loop.first and tools and not tools_turn -%}
      {{ '\n\n# Tools\n<tools>\n' + tools + '\n</tools>' }}
    {%- endif -%}
    {{ '<|im_end|>\n' }}
  {%- endif -%}
  {%- if loop.first and tools and tools_turn %}{{ '<|im_start|>tools\n' + tools + '<|im_end|>\n' }}{% endif -%}
{%- endfor -%}
{%- if generate %}{{ '<|im_start|>assistant\n' + ('<think>\n' if thinking else '<think>\n\n</think>\n\n') }}{% endif -%}
"""

GEMMA = """
{{- '<bos>' -}}
{%- set ns = namespace(open=false, told=false) -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {{ '<|tool_response>response:f{value:' + m.content + '}<tool_response|>' }}{%- set ns.told = true -%}
  {%- else -%}
    {%- if not (ns.open and m.role == 'assistant') -%}
      {{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {%- endif -%}
    {%- set ns.told = false -%}
    {{ m.content }}
    {%- if m.role == 'system' and loop.first and tools and not tools_turn -%}
      {{ '<|tool>declaration:' + tools + '<tool|>' }}
    {%- endif -%}
    {%- if m.call %}{{ '<|tool_call>call:' + m.call + '<tool_call|>' }}{%- set ns.open = true -%}
    {%- else %}{{ '<turn|>\n' }}{%- set ns.open = false -%}{%- endif -%}
  {%- endif -%}
  {%- if loop.first and tools and tools_turn %}{{ '<|turn>tools\n' + tools + '<turn|>\n' }}{% endif -%}
{%- endfor -%}
{%- if generate and not ns.told -%}
  {{ '<|turn>model\n' + ('' if thinking else '<|channel>thought\n<channel|>') }}
{%- endif -%}
"""

LAGUNA = """
{{- '〈|EOS|〉' -}}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}{{ '<tool_response>' + gap + m.content + gap + '</tool_response>\n' }}
  {%- else -%}
    {{ '<' + m.role + '>' + gap }}
    {%- if m.role == 'assistant' %}{{ '</think>' }}{% endif -%}
    {{ m.content }}
    {%- if m.call %}{{ '<tool_call>' + m.call + '</tool_call>' }}{% endif -%}
    {%- if m.role == 'system' and loop.first and tools and not tools_turn -%}
      {{ '\n\n### Tools\n<available_tools>\n' + tools + '</available_tools>' }}
    {%- endif -%}
    {{ gap + '</' + m.role + '>\n' }}
  {%- endif -%}
  {%- if loop.first and tools and tools_turn %}{{ '<available_tools>\n' + tools + '</available_tools>\n' }}{% endif -%}
{%- endfor -%}
{%- if generate %}{{ '<assistant>' + gap + ('<think>' if thinking else '</think>') }}{% endif -%}
"""

TEMPLATES = {"deepseek": DEEPSEEK, "qwen": QWEN, "gemma": GEMMA, "laguna": LAGUNA}

GENERATION = {"deepseek": "<｜Assistant｜>", "qwen": "<|im_start|>assistant\n", "gemma": "<|turn>model\n"}
GENERATION["laguna"] = "<assistant>"

CONTROLS = {
    "deepseek": [
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        "<think>",
        "</think>",
    ],
    "qwen": ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>"],
    "gemma": ["<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_response>", "<tool_response|>"],
    "laguna": ["〈|EOS|〉", "<assistant>", "</assistant>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
}

_ENVIRONMENT = jinja2.Environment(undefined=jinja2.StrictUndefined)
_COMPILED = {family: _ENVIRONMENT.from_string(source) for family, source in TEMPLATES.items()}


def render(family: str, messages: list[dict], **options: object) -> str:
    """The prompt; options: generate (True), thinking, tools (text), tools_turn, results_in_user_turns, gap."""
    defaults = dict(generate=True, thinking=True, tools="", tools_turn=False, results_in_user_turns=False, gap="")
    rows = [{"call": "", **message} for message in messages]
    return _COMPILED[family].render(messages=rows, **{**defaults, **options})


Tokenizer = Callable[[str], list[int]]
"""Text to byte offsets [n + 1]."""


def chunks(seed: int, longest: int) -> Tokenizer:
    """Tokens of 1 to `longest` bytes, with edges anywhere: in markers, over them, inside characters."""

    def offsets(text: str) -> list[int]:
        rng = random.Random(seed)
        n = len(text.encode())
        edges = [0]
        while edges[-1] < n:
            edges.append(min(n, edges[-1] + rng.randint(1, longest)))
        return edges

    return offsets


def words(family: str = "", typed: tuple[str, ...] = ()) -> Tokenizer:
    """Words with the blank before them, punctuation signs, digits; with a family also its control tokens, though not in
    the passages `typed`, where they are ordinary text as for a tokenizer that is told what a user typed."""
    plain = r" ?[^\W\d_]+|\d|\s+|[^\w\s]|_"
    control = "|".join(re.escape(c) for c in CONTROLS.get(family, ()))

    def offsets(text: str) -> list[int]:
        passages = re.split("(" + "|".join(map(re.escape, typed)) + ")", text) if typed else [text]
        pieces = []
        for number, passage in enumerate(passages):
            pattern = plain if number % 2 or not control else f"{control}|{plain}"
            pieces += re.findall(pattern, passage)
        edges = [0]
        for piece in pieces:
            edges.append(edges[-1] + len(piece.encode()))
        assert edges[-1] == len(text.encode())
        return edges

    return offsets


def tokenizers(family: str) -> dict[str, Tokenizer]:
    """A drafter with the markers as tokens, one without, single bytes, and tokens that merge over every edge."""
    return {
        "own": words(family),
        "foreign": words(),
        "bytes": chunks(0, 1),
        "short": chunks(1, 5),
        "long": chunks(2, 13),
        "longer": chunks(3, 40),
    }
