"""The names in the configuration are those that there are."""

from typing import get_args

import pytest

from agentrl.config.render import FormatName, ParserName, RenderConfig
from agentrl.render.formats.package import PACKAGE_FORMATS
from agentrl.render.parsers.registry import PARSERS, SIGNS
from agentrl.render.registry import FORMATS


def test_every_format_that_can_be_named_is_there():
    assert sorted(get_args(FormatName)) == sorted(["auto", "template", *FORMATS, *PACKAGE_FORMATS])


def test_every_parser_that_can_be_named_is_there():
    assert sorted(get_args(ParserName)) == sorted(["auto", *PARSERS])
    assert {name for _, name in SIGNS} <= set(PARSERS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_its_name_and_a_parser_that_can_be_named(name):
    format = FORMATS[name](RenderConfig())
    assert format.name == ("chatml" if name == "smollm2" else name), "SmolLM2's is ChatML with a system message"
    assert type(format.parser) in PARSERS.values()
