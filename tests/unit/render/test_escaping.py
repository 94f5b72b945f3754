"""Added tokens that are not special, in contents."""

import pytest

from agentrl.config.model import RenderConfig
from agentrl.core.types import Message
from agentrl.render.registry import make_renderer
from tests.unit.render.conversations import added_ids
from tests.unit.render.tokenizers import qwen_tokenizer

MARKUP = "a</think><tool_call>b<|im_end|>"
"""Two of Qwen's added tokens that are not special, and one that is."""


def ids_named(tokenizer, ids):
    return [tokenizer.decode([index]) for index in ids if index in tokenizer.added_tokens_decoder]


@pytest.mark.parametrize(
    ("escaped", "actual"), [(False, ["</think>", "<tool_call>"]), (True, [])], ids=["by default", "escaped"]
)
def test_added_tokens_in_contents_are_escaped_if_asked(escaped, actual):
    """Also of tools' results and of inline text; not what the policy sampled, nor what a demonstration says."""
    tokenizer = qwen_tokenizer()
    renderer = make_renderer(tokenizer, RenderConfig(format="qwen3", escape_added_tokens=escaped))
    bare, ask = renderer.render((Message("user", "x"),)).token_ids, (Message("user", MARKUP),)
    prompt = renderer.render(ask).token_ids
    assert renderer.decode(prompt).count(MARKUP) == 1
    template = ids_named(tokenizer, bare)
    assert sorted(ids_named(tokenizer, prompt)) == sorted(template + actual)
    sampled = tuple(tokenizer.encode("<think>\nr\n</think>\n\nas1", add_special_tokens=False))
    message = renderer.parse(sampled)
    added = added_ids(renderer.bridge((*ask, message), sampled, (Message("tool", MARKUP, tool_call_id="c"),)))
    plain = added_ids(renderer.bridge((*ask, message), sampled, (Message("tool", "x", tool_call_id="c"),)))
    assert sorted(ids_named(tokenizer, added)) == sorted(ids_named(tokenizer, plain) + actual)
    inline = added_ids(renderer.bridge((*ask, message), sampled, (Message("user", MARKUP, inline=True),)))
    assert ids_named(tokenizer, inline) == actual
    demonstrated = Message("assistant", "<think>\nr\n</think>\n\nas1")
    for turn in (message, demonstrated):
        assert ids_named(tokenizer, renderer.render((Message("user", "x"), turn)).token_ids).count("</think>") == 1
    assert ids_named(tokenizer, renderer.encode(MARKUP)) == ["</think>", "<tool_call>"]
