from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.sampler.embedded.request import Options
from agentrl.sampler.embedded.sampling import sample


def request(seed: int | None = None, **options: Any) -> Any:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return SimpleNamespace(options=Options(**options), generator=generator)


def draw(logits: torch.Tensor, one: Any, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids, logprobs = sample(logits.expand(count, -1), [one] * count, torch.Generator().manual_seed(seed))
    return torch.tensor(ids), torch.tensor(logprobs)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_distribution_at_the_temperature(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -30.0, 0.5])
    ids, logprobs = draw(logits, request(temperature=temperature), 40_000)
    wanted = (logits / temperature).softmax(-1)
    torch.testing.assert_close(torch.bincount(ids, minlength=5) / 40_000, wanted, atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs, wanted.log()[ids])


def test_greedy_takes_the_likeliest_at_temperature_one() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    for options in ({"temperature": 0.0}, {"top_k": 1, "temperature": 0.5}):
        ids, logprobs = draw(logits, request(**options), 3)
        assert ids.tolist() == [1, 1, 1]
        torch.testing.assert_close(logprobs, logits.log_softmax(-1)[1].expand(3))


def test_top_p_and_top_k_leave_out_the_rest_and_the_logprobs_alone() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    cases = [({"top_k": 2}, {0, 1}), ({"top_p": 0.7}, {0, 1}), ({"top_p": 0.4}, {0})]
    for options, kept in [*cases, ({"top_k": 3, "top_p": 0.9}, {0, 1, 2})]:
        ids, logprobs = draw(logits, request(**options), 4000)
        assert set(ids.tolist()) == kept
        torch.testing.assert_close(logprobs, logits[ids])


def test_requests_of_one_batch_have_their_own_options_and_seeds() -> None:
    logits = torch.zeros(4, 1000)
    logits[1, 5] = 50.0
    batch = [request(seed=3), request(temperature=0.0), request(seed=3), request(top_k=1)]
    first, _ = sample(logits, batch, torch.Generator().manual_seed(0))
    assert first[0] == first[2]
    assert first[1] == 5


def test_broken_weights_are_an_error() -> None:
    with pytest.raises(FloatingPointError, match="finite"):
        draw(torch.tensor([0.0, float("nan")]), request(), 1)
