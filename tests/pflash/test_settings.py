"""Settings from the environment: defaults, every variable, and refusals that name the variable."""

import math
import os
from dataclasses import fields

import numpy as np
import pytest

from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.settings import SelectionSettings, variable

ALL = {
    "PFLASH_SELECT_MODE": ("top_p", "top_p"),
    "PFLASH_SELECT_CHUNK_SIZE": ("256", 256),
    "PFLASH_SELECT_QUERY_TOKENS": ("512", 512),
    "PFLASH_SELECT_QUERY_PARSER": ("latest_user", "latest_user"),
    "PFLASH_SELECT_TOP_P": ("1", 1.0),
    "PFLASH_SELECT_SEGMENTS": ("probe", "probe"),
    "PFLASH_SELECT_SCORE": ("density", "density"),
    "PFLASH_SELECT_SCORER": ("split", "split"),
    "PFLASH_SELECT_SPLIT": (".25", 0.25),
    "PFLASH_SCORING_HEAD_GGUF": ("/models/head.gguf", "/models/head.gguf"),
    "PFLASH_SEGMENT_PROBE_GGUF": ("probe one.gguf", "probe one.gguf"),
    "PFLASH_QWEN35_LEGACY_SCORER": ("1", True),
    "PFLASH_CHAT_SKELETON_TOKENS": ("0", 0),
    "PFLASH_CHAT_HISTORY_QUERIES": ("8", 8),
    "PFLASH_CHAT_RECALL_MIN_LIFT": ("2.5e0", 2.5),
    "PFLASH_CHAT_VIEW": ("0", False),
    "PFLASH_DRAFTER_SESSIONS": ("16", 16),
    "PFLASH_TRACE_PATH": ("trace.jsonl", "trace.jsonl"),
}


def field(name: str) -> str:
    return name.removeprefix("PFLASH_").lower()


def test_defaults() -> None:
    settings = SelectionSettings.from_env({"HOME": "/", "PFLASH_SOMETHING_ELSE": ""})
    assert settings == SelectionSettings()
    assert (settings.select_mode, settings.select_chunk_size, settings.select_query_tokens) == (None, None, 8)
    assert (settings.select_query_parser, settings.select_top_p) == ("arbitrary_tail", 0.95)
    assert (settings.select_segments, settings.select_score, settings.select_scorer) == ("auto", "auto", "head")
    assert (settings.select_split, settings.qwen35_legacy_scorer, settings.trace_path) == (0.5, False, None)
    assert (settings.chat_skeleton_tokens, settings.chat_history_queries) == (256, 3)
    assert (settings.chat_recall_min_lift, settings.chat_view, settings.drafter_sessions) == (2.0, True, 2)
    assert settings.scoring_head_gguf is None and settings.segment_probe_gguf is None


def test_every_variable() -> None:
    assert {variable(f.name) for f in fields(SelectionSettings)} == set(ALL)
    settings = SelectionSettings.from_env({name: text for name, (text, _) in ALL.items()})
    for name, (_, value) in ALL.items():
        assert getattr(settings, field(name)) == value and type(getattr(settings, field(name))) is type(value)


BAD = {
    "PFLASH_SELECT_MODE": ["legacy", "TOP_P", "top_p "],
    "PFLASH_SELECT_CHUNK_SIZE": ["0", "12x", "-1", " 12", "1_0", "٣", "1.0", "0x10", "9" * 30, str(2**31)],
    "PFLASH_SELECT_QUERY_TOKENS": ["0", "513", "-8", "8.0"],
    "PFLASH_SELECT_QUERY_PARSER": ["last_128", "Latest_User"],
    "PFLASH_SELECT_TOP_P": ["nan", "0", "1.01", "-0.5", "inf", "1e999", "half", "0,5", " 0.5", "1_0e-1"],
    "PFLASH_SELECT_SEGMENTS": ["sentences"],
    "PFLASH_SELECT_SCORE": ["mean"],
    "PFLASH_SELECT_SCORER": ["tail"],
    "PFLASH_SELECT_SPLIT": ["1.0", "0", "nan"],
    "PFLASH_SCORING_HEAD_GGUF": ["  ", "a\0b"],
    "PFLASH_SEGMENT_PROBE_GGUF": [" "],
    "PFLASH_QWEN35_LEGACY_SCORER": ["yes", "2", "true", "01"],
    "PFLASH_CHAT_SKELETON_TOKENS": ["-1", "many"],
    "PFLASH_CHAT_HISTORY_QUERIES": ["9", "-1"],
    "PFLASH_CHAT_RECALL_MIN_LIFT": ["-1", "nan"],
    "PFLASH_CHAT_VIEW": ["2", "on"],
    "PFLASH_DRAFTER_SESSIONS": ["17", "-1", "two"],
    "PFLASH_TRACE_PATH": [" "],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in ["", *texts]])
def test_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is "):
        SelectionSettings.from_env({**{other: good for other, (good, _) in ALL.items()}, name: text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("select_mode", 3),
        ("select_mode", ["top_p"]),
        ("select_chunk_size", 12.0),
        ("select_chunk_size", True),
        ("select_query_tokens", None),
        ("select_query_tokens", "8"),
        ("select_top_p", math.nan),
        ("select_top_p", "0.5"),
        ("select_top_p", 10**400),
        ("chat_view", None),
        ("chat_view", "1"),
        ("trace_path", 5),
        ("trace_path", b"bytes"),
    ],
)
def test_arguments_are_checked_as_well(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{variable(name)} is "):
        SelectionSettings(**{name: value})


def test_arguments_are_normalised(tmp_path: os.PathLike) -> None:
    settings = SelectionSettings(
        select_chunk_size=np.int64(7), select_top_p=np.float32(0.5), chat_view=1, trace_path=tmp_path
    )
    assert type(settings.select_chunk_size) is int and type(settings.select_top_p) is float
    assert settings.chat_view is True and settings.trace_path == str(tmp_path)


@pytest.mark.parametrize("mapping", [None, 5, "PFLASH_SELECT_MODE"])
def test_mappings_only(mapping: object) -> None:
    with pytest.raises(ConfigError, match="mapping"):
        SelectionSettings.from_env(mapping)  # type: ignore[arg-type]
