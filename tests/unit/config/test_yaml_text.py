"""YAML 1.2: what each text is, and what is refused; on the command line as in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.load import parse_override, read_yaml
from agentrl.config.yaml_text import dump_yaml, parse_yaml
from agentrl.core.errors import ConfigError

TEXTS = "yes no on off y N 12:30 2026-11-26 1_000 0b11 0x 1e << = 08:00:00 '010' truE .infinity +.nan"
SCALARS: dict[str, Any] = {
    **{text: text.strip("'") for text in TEXTS.split()},
    "010": 10,
    "-007": -7,
    "+5": 5,
    "0o17": 15,
    "0x1F": 31,
    "1e-3": 0.001,
    "1e3": 1000.0,
    ".5": 0.5,
    "5.": 5.0,
    "-.inf": float("-inf"),
    "true": True,
    "FALSE": False,
    "Null": None,
    "~": None,
    "": None,
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_are_those_of_the_core_schema(tmp_path: Path, text: str, value: object) -> None:
    (tmp_path / "c.yaml").write_text(f"key: {text}\n")
    for tree in (read_yaml(tmp_path / "c.yaml"), parse_override(f"key={text}")):
        assert (tree, type(tree["key"])) == ({"key": value}, type(value))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\nlearner:\n  lr: 1\nb: 2\nlearner:\n  lr: 2\n", r"line 5: the key 'learner' is in line 2 too"),
        ("a:\n  - {b: 1, c: 2, 'b': 3}\n", r"line 2: the key 'b' is twice in one line"),
        ("a: &x [1]\nb: *x\n", r"line 1: &x: anchors and aliases are not supported"),
        ("a: &x\n  b: *x\n", r"line 1: &x: anchors"),
        ("&x a: 1\n", r"line 1: &x: anchors"),
        ("a: *x\n", r"line 1: \*x: anchors"),
        ("{[a]: 1}", "line 1: a key is text"),
        ("{true: 1}", "line 1: a key is text"),
        ("{1: 2, '1': 3}", "line 1: the key '1' is twice in one line"),
        ("a: !!map [b]", "line 1: this is no mapping"),
        ("a: 1\n---\nb: 2\n", "line 2: but found another document"),
        ("a: !!timestamp 2026-01-01\n", "line 1: could not determine a constructor"),
        ("a: !!python/name:os.system\n", "line 1: could not determine a constructor"),
        ("a: !!int '12:30'\n", "invalid literal"),
        ("a: !!bool yes\n", "'yes' is neither true nor false"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: [1\n", "expected ',' or ']'"),
        ("a: \x00\n", "special characters"),
    ],
)
def test_what_is_refused_names_file_and_line(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"configuration .*c\.yaml.*{why}") as refusal:
        read_yaml(file)
    assert "\n" not in str(refusal.value)


SCALAR = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from([*SCALARS])
)


@given(st.recursive(SCALAR, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_what_is_written_is_read_back_by_this_and_by_yaml_1_1(value: object) -> None:
    for flow in (False, True):
        text = dump_yaml(value, flow=flow)
        assert parse_yaml(text, "text") == value
        assert yaml.safe_load(text) == value
