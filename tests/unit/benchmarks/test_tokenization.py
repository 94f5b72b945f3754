"""The long conversation of ``agentrl bench masks`` holds what it says, and both ways of it come to the same tokens."""

import asyncio

import numpy as np
from transformers import PreTrainedTokenizerBase

from agentrl.render.renderer import ChatRenderer
from benchmarks.tokenization import converse, long_episode, retokenise


def tokenizer_of(renderer: ChatRenderer) -> PreTrainedTokenizerBase:
    return renderer._tokenizer


def test_a_long_conversation_is_one_row_and_what_the_template_writes(renderer):
    tokenizer = tokenizer_of(renderer)
    episode = long_episode(tokenizer, renderer.end_token_id, 5, 40, seed=3)
    assert len(set(episode.observed)) == 5, "every observation is tokenised"
    assert {len(said.token_ids) for said in episode.samples} == {20}
    (row,) = asyncio.run(converse(renderer, episode))
    assert row.token_ids[row.mask == 1].tolist() == [token for said in episode.samples for token in said.token_ids]
    texts = [tokenizer.decode(list(said.token_ids[:-1])) for said in episode.samples]
    messages = [
        {"role": role, "content": text}
        for observed, said in zip(episode.observed, texts, strict=True)
        for role, text in (("user", observed), ("assistant", said))
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert np.array_equal([*row.token_ids, *newline], whole)
    assert retokenise(tokenizer, episode, texts) > 0
