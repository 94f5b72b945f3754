import os
import sys

import pytest

from agentrl.distributed.broadcast_group import NAME, find_interface, gloo_on


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the loopback has another name")
def test_gloo_takes_the_network_of_an_address_for_a_while(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    assert find_interface("127.0.0.1") == "lo"
    with gloo_on("127.0.0.1"):
        assert os.environ[NAME] == "lo"
    assert NAME not in os.environ
    with gloo_on("203.0.113.7"):  # an address of no machine
        assert NAME not in os.environ
    monkeypatch.setenv(NAME, "eth7")
    with gloo_on("127.0.0.1"):
        assert os.environ[NAME] == "eth7"
    assert os.environ[NAME] == "eth7"
