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
    assert {len(sample.token_ids) for sample in episode.samples} == {20}
    (row,) = asyncio.run(converse(renderer, episode))
    assert row.token_ids[row.mask == 1].tolist() == [token for sample in episode.samples for token in sample.token_ids]
    texts = [tokenizer.decode(list(sample.token_ids[:-1])) for sample in episode.samples]
    messages = [
        {"role": role, "content": text}
        for observed, sample in zip(episode.observed, texts, strict=True)
        for role, text in (("user", observed), ("assistant", sample))
    ]
    full_token_ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert np.array_equal([*row.token_ids, *newline], full_token_ids)
    assert retokenise(tokenizer, episode, texts) > 0
