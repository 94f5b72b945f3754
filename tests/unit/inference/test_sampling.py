from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.inference.embedded.request import SamplingOptions
from agentrl.inference.embedded.sampling import sample


def request(seed: int = 0, tokens: int = 1, support: str | None = None, **options: Any) -> Any:
    return SimpleNamespace(
        options=SamplingOptions(**options), seed=seed, prompt=[0] * tokens, output=[], support=support
    )


def draw(logits: torch.Tensor, count: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, logprobs, _ = sample(logits.expand(count, -1), [request(seed, **options) for seed in range(count)])
    return torch.tensor(ids), torch.tensor(logprobs)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_distribution_at_the_temperature(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -30.0, 0.5])
    ids, logprobs = draw(logits, 40_000, temperature=temperature)
    expected = (logits / temperature).softmax(-1)
    torch.testing.assert_close(torch.bincount(ids, minlength=5) / 40_000, expected, atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[ids])


def test_greedy_takes_the_likeliest_at_temperature_one() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    for options in ({"temperature": 0.0}, {"top_k": 1, "temperature": 0.5}):
        ids, logprobs = draw(logits, 3, **options)
        assert ids.tolist() == [1, 1, 1]
        torch.testing.assert_close(logprobs, logits.log_softmax(-1)[1].expand(3))


def test_top_p_and_top_k_leave_out_the_rest_and_the_logprobs_alone() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    cases = [({"top_k": 2}, {0, 1}), ({"top_p": 0.7}, {0, 1}), ({"top_p": 0.4}, {0})]
    # Of the three tokens that top-k leaves, the first two have 0.84 of the probability; they have 0.8 of the whole.
    for options, kept_ids in [*cases, ({"top_k": 3, "top_p": 0.82}, {0, 1, 2})]:
        ids, logprobs = draw(logits, 4000, **options)
        assert set(ids.tolist()) == kept_ids
        torch.testing.assert_close(logprobs, logits[ids])


def test_requests_of_one_batch_have_their_own_options_and_seeds() -> None:
    logits = torch.zeros(4, 1000)
    logits[1, 5] = 50.0
    batch = [request(seed=3), request(temperature=0.0), request(seed=3), request(top_k=1)]
    first, _, _ = sample(logits, batch)
    assert first[0] == first[2]
    assert first[1] == 5


def test_what_a_request_draws_depends_on_its_seed_and_position_alone() -> None:
    logits = torch.zeros(1000)
    alone, _, _ = sample(logits.expand(1, -1), [request(7, tokens=3)])
    beside, _, _ = sample(logits.expand(3, -1), [request(1), request(7, tokens=3), request(7, tokens=4)])
    assert beside[1] == alone[0]
    assert len(set(beside)) == 3
    later = request(7, tokens=1)
    later.output = [5, 6]
    assert sample(logits.expand(1, -1), [later])[0] == alone, "prompt and output count alike"


def test_broken_weights_are_an_error() -> None:
    with pytest.raises(FloatingPointError, match="finite"):
        draw(torch.tensor([0.0, float("nan")]), 1)
