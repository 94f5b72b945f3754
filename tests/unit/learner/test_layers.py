"""Noise of torch about recomputed layers."""

import logging

import pytest

import agentrl.learner.layers  # noqa: F401 - silences it


def test_one_known_warning_of_torch_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._higher_order_ops.wrap")
    log.warning(
        "\nDetected that context_fn is passed to torch.utils.checkpoint under torch.compile.\nPlease make sure %s", "x"
    )
    log.warning("another fault")
    assert caplog.messages == ["another fault"]
