"""Training on what top-k and top-p left: the learner's log-probabilities are those with which the engine sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algo.registry import algorithm_faults
from agentrl.config.load import validate
from agentrl.core.errors import SamplerError
from agentrl.core.types import Row, SamplingParams
from agentrl.episode.trajectory import Trajectory
from agentrl.inference.client.generation import generate_body, read_reply
from agentrl.inference.client.segments import Vocabulary, support_options
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.replies import BadRequestError
from agentrl.inference.embedded.request import parse_generate
from agentrl.inference.embedded.scheduler import Scheduler
from tests.batches import pack_rows
from tests.supports import add_support
from tests.unit.learner.learners import VOCAB, Learners, gradients, make_model, make_rows
from tests.unit.learner.test_shared_prefixes import make_rows as make_shared_rows

STOPS: Any = SimpleNamespace(text=lambda *args, **options: "")
PARAMS = SamplingParams(
    max_new_tokens=12, temperature=0.7, top_k=20, top_p=0.8, seed=5, ignore_eos=True, support="logprobs"
)
SIZES: dict[str, Any] = {"data_parallel_size": 1, "tokens_per_micro": 128, "pad_id": 0, "temperature": 0.7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("support") / "model")


@pytest.fixture
def learners(folder: Path) -> Iterator[Learners]:
    opened = Learners(folder)
    yield opened
    opened.close()


async def replies(folder: Path, params: SamplingParams, turns: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Bodies and replies of turns, each of which continues the one before."""
    scheduler = Scheduler(Model(folder, torch.float32, 2, 128), STOPS, 2, 0, "0")
    engine = asyncio.create_task(scheduler.run())
    prompt, pairs = [5, 6, 7, 8, 9], []
    try:
        for _ in range(turns):
            body = generate_body(prompt, params, params.max_new_tokens, "q") | support_options(params)
            [generate_input], _ = parse_generate(body)
            request = scheduler.submit(generate_input)
            await request.done
            reply = json.loads(json.dumps(scheduler.reply(request)))
            pairs.append((body, reply))
            prompt = [*prompt, *reply["output_ids"], 11, 12]
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
    return pairs


def sample_row(folder: Path, params: SamplingParams) -> Row:
    """A row of two turns of the embedded engine."""
    trajectory = Trajectory()
    trajectory.temperature = params.temperature
    for number, (body, reply) in enumerate(asyncio.run(replies(folder, params, 2))):
        trajectory.extend_to(body["input_ids"])
        segment = read_reply(json.dumps(reply).encode(), body, f"q{number}", Vocabulary(VOCAB, str))
        trajectory.append_sampled(segment.generation)
    [row] = trajectory.rows("p", "r")
    return row


@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        replace(PARAMS, support="ids"),
        replace(PARAMS, top_k=-1, top_p=0.5),
        replace(PARAMS, top_p=1.0, top_k=7, support="ids"),
    ],
)
def test_the_learner_computes_the_log_probabilities_with_which_the_engine_sampled(
    folder: Path, learners: Learners, params: SamplingParams
) -> None:
    row = sample_row(folder, params)
    assert row.support is not None
    at = row.mask.astype(bool)
    assert 1 < row.support.counts[at].mean() < 20
    assert (row.support.counts[at] <= (params.top_k if params.top_k > 0 else VOCAB)).all()
    assert (row.support.logprobs is not None) == (params.support == "logprobs")
    learner = learners.open()
    differences = {}
    for replay in (True, False):
        batch = pack_rows([row], {"r": 1.0}, **SIZES, replays_support=replay)
        logprobs = learner.logprobs(batch)[row.key]
        differences[replay] = float(np.abs(logprobs - row.logprobs)[at].max())
    assert differences[True] < 2e-5
    assert differences[False] > 1e-2, "the whole distribution has others"


def test_the_ids_stay_those_of_the_engine_when_the_weights_change(folder: Path, learners: Learners) -> None:
    row = sample_row(folder, PARAMS)
    assert row.support is not None
    learner = learners.open(lr=3e-3)
    batch = pack_rows([row], {"r": -1.0}, **SIZES, replays_support=True)
    for _ in range(3):
        learner.train_step(batch)
    trained = learner.logprobs(batch)[row.key]
    hf = learner.rank.model.hf
    with torch.no_grad():
        logits = hf.get_output_embeddings()(
            hf.base_model(
                input_ids=torch.from_numpy(row.token_ids).long()[None],
                position_ids=torch.arange(len(row.mask))[None],
                use_cache=False,
                packed=learner.rank.model.attention_rows(
                    torch.arange(len(row.mask))[None], torch.zeros(1, len(row.mask), dtype=torch.int32)
                ),
            ).last_hidden_state[0]
        )
    offsets = row.support.offsets
    for place in np.flatnonzero(row.mask):
        ids = row.support.token_ids[offsets[place] : offsets[place + 1]]
        kept = (logits[place - 1] / 0.7)[torch.from_numpy(ids).long()].log_softmax(-1)
        expected = float(kept[(ids == row.token_ids[place]).nonzero()[0][0]])
        assert trained[place] == pytest.approx(expected, abs=1e-4)
    assert np.abs(trained - row.logprobs)[row.mask != 0].max() > 1e-2


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_rows_that_share_prefixes_have_their_own_supports(learners: Learners, share_prefixes: bool) -> None:
    rows = [add_support(row, VOCAB, seed) for seed, row in enumerate(make_shared_rows(0))]
    sizes = SIZES | {"tokens_per_micro": 4096, "temperature": 1.0}
    advantages = {"a": 1.5, "b": -0.5, "c": 0.25, "d": -1.0}
    together = pack_rows(rows, advantages, **sizes, share_prefixes=share_prefixes, replays_support=True)
    assert together.micro[0][0].shares_prefixes == share_prefixes
    learner = learners.open()
    logprobs = learner.logprobs(together)
    for row in rows:
        alone = learner.logprobs(pack_rows([row], advantages, **sizes, replays_support=True))[row.key]
        assert np.abs(logprobs[row.key] - alone).max() < 2e-5


def test_score_centering_changes_the_gradient_and_nothing_where_engine_and_learner_agree(
    folder: Path, learners: Learners
) -> None:
    algo = {"loss": {"name": "reinforce"}, "old_logprobs": "learner", "correction": {"rollout_is": "none"}}
    sampler = {"renormalise": "engine", "top_k": 20}
    rows = {"agree": sample_row(folder, PARAMS), "differ": add_support(make_rows([40])[0], VOCAB, 0)}
    changes = {}
    for kind, row in rows.items():
        by_option = []
        sizes = SIZES | {"temperature": row.temperature}
        for centers in (False, True):
            config = validate({"algo": algo | {"score_centering": centers}, "sampler": sampler}, [algorithm_faults])
            batch = pack_rows([row], {row.key.rollout_id: 1.0}, **sizes, replays_support=True)
            by_option.append(gradients(learners.open(algo=config.algo), batch, torch.float32))
        plain, centered = by_option
        changes[kind] = max(float((plain[name] - centered[name]).abs().max()) for name in plain)
    assert changes["agree"] < 1e-5
    assert changes["differ"] > 1e-3


def test_replies_that_do_not_fit_are_refused(folder: Path) -> None:
    vocabulary = Vocabulary(VOCAB, str)
    [(body, reply)] = asyncio.run(replies(folder, PARAMS, 1))
    meta = reply["meta_info"]
    masks, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    sampled = reply["output_ids"][0]
    faults: list[tuple[dict[str, Any], str]] = [
        ({"output_token_sampling_mask": None}, r"SGLang returns since 0\.5\.23; .*sampler\.renormalise=learner"),
        ({"output_token_sampling_mask": masks[1:]}, "12 tokens, 11 sampling masks"),
        ({"output_token_sampling_mask": [[sampled + 1], *masks[1:]]}, "without the sampled token"),
        ({"output_token_sampling_mask": [[sampled, sampled], *masks[1:]]}, "with an id twice"),
        ({"output_token_sampling_mask": [[sampled, VOCAB], *masks[1:]]}, f"ids outside of 0 to {VOCAB - 1}"),
        ({"output_token_sampling_logprobs": [[], *logprobs[1:]]}, "other numbers of sampling log-probabilities"),
    ]
    for change, words in faults:
        broken = reply | {"meta_info": meta | change}
        with pytest.raises(SamplerError, match=words):
            read_reply(json.dumps(broken).encode(), body, "q", vocabulary)
    single = body | {"sampling_logprobs_mode": "selected"}
    with pytest.raises(SamplerError, match="lists of sampling log-probabilities"):
        read_reply(json.dumps(reply).encode(), single, "q", vocabulary)


def test_the_embedded_engine_refuses_supports_of_the_whole_vocabulary() -> None:
    body = generate_body([5], SamplingParams(), 4, "q")
    with pytest.raises(BadRequestError, match="return_sampling_mask requires top_p below 1"):
        parse_generate(body | {"return_sampling_mask": True})
    with pytest.raises(BadRequestError, match="sampling_logprobs_mode='all' is none of selected, support"):
        parse_generate(body | {"return_sampling_mask": True, "sampling_logprobs_mode": "all"})
    with pytest.raises(BadRequestError, match="can only be set when return_sampling_mask=true"):
        parse_generate(body | {"sampling_logprobs_mode": "support"})
