"""The check after the first sync, with an embedded engine at its address and a learner: tokens fit, and faults are named."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import uvicorn
from byte_renderer import byte_tokenizer
from engine_tiny import save_model

from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, EngineError
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.embedded.app import build_app
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.stop_strings import StopMatcher
from agentrl.learner.base import LearnerGroup
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.render.registry import make_renderer
from agentrl.runtime.engine_gap import gap_band
from agentrl.runtime.engine_precision import read_precision
from agentrl.train.first_sync import TURNS, FirstSyncCheck, SGLangClients
from agentrl.weight_sync.base import TransportOptions, WeightSync
from agentrl.weight_sync.registry import make_transport

CONTEXT = 512
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
KEYS = [
    "learner.device=cpu",
    "learner.threads=1",
    "learner.precision=float32",
    f"rollout.max_tokens={CONTEXT}",
    f"sampler.embedded.context={CONTEXT}",
]


@dataclass
class World:
    """A learner and an engine with the weights of one folder."""

    folder: Path
    config: Config
    learner: LearnerGroup
    model: Model
    url: str

    def compare(self) -> dict[str, float]:
        tokenizer = byte_tokenizer(TEMPLATE)
        dtype = self.model.dtype
        band = gap_band(self.config, read_precision(self.config, self.folder), dtype)
        assert band is not None
        vocabulary = Vocabulary(self.model.vocabulary, tokenizer.decode)

        async def run() -> dict[str, float]:
            options = TransportOptions(1 << 20, self.folder, dtype=dtype, check="checksum")
            resend: WeightSync = make_transport("tensor", options)
            renderer = make_renderer(tokenizer)
            check = FirstSyncCheck.open(self.config, self.folder, renderer, band, vocabulary, resend, dtype)
            client = SGLangClient(self.url)
            try:
                await check.sample([client])
                check.score_learner(self.learner)
                return await check.compare(self.learner, [client], 0)
            finally:
                await client.aclose()
                await resend.aclose()

        return asyncio.run(run())


Open = Callable[[Path], World]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture
def open_world(folder: Path) -> Iterator[Open]:
    """Opens a learner with the weights of ``folder``, and an engine with those of a folder."""
    config = load_config(None, [*KEYS, f"model.path={folder}"])
    learner = LocalLearnerGroup(folder, config.learner, config.algo, seed=0)
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))

        def start(engine_folder: Path) -> World:
            model = Model(engine_folder, torch.float32, 16, CONTEXT)
            stops = StopMatcher(byte_tokenizer(TEMPLATE), model.vocabulary)
            app = build_app(Scheduler(model, stops, 16, 0, "0"), lambda error: None)
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            servers.append((server, thread))
            while not server.started:
                thread.join(0.005)
                assert thread.is_alive()
            return World(folder, config, learner, model, f"http://127.0.0.1:{listener.getsockname()[1]}")

        try:
            yield start
        finally:
            for server, thread in servers:
                server.should_exit = True
                thread.join()
            learner.close()


def test_conversations_longer_than_the_context_are_cut_to_it(
    open_world: Open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = open_world(folder).compare()
    assert not caplog.records, "no engine is left out"
    assert {f"sync/gap/turn={turn}" for turn in TURNS} <= metrics.keys()
    assert metrics["sync/gap"] < 1e-8
    assert metrics["sync/gap_limit"] == 1e-4


def test_weights_that_a_sync_has_lost_come_when_they_are_sent_again(open_world: Open, folder: Path) -> None:
    world = open_world(folder)
    name, weight = next(pair for pair in world.model.parameters() if "layers.1" in pair[0])
    world.model.load_weights([(name, torch.randn_like(weight))])
    with pytest.raises(ConfigError, match=r"k3 .* for float32 weights\. .* the gap is gone: the run's transport"):
        world.compare()


def test_the_first_module_of_an_engine_that_computes_another_model_is_named(
    open_world: Open, folder: Path, tmp_path: Path
) -> None:
    """Its folder has another base of rotary embeddings: attention of the first layer is other."""
    shutil.copytree(folder, tmp_path / "engine")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 3.0
    (tmp_path / "engine" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as raised:
        open_world(tmp_path / "engine").compare()
    message = str(raised.value)
    assert "The engine has the weights that were sent, by their checksums" in message
    assert "The engine computes another model with them" in message
    assert "the first module whose output differs is model.layers.0.self_attn (relative distance" in message


def test_a_learner_that_computes_another_model_is_named(open_world: Open, folder: Path) -> None:
    """Its attention sees half of what it should."""
    world = open_world(folder)
    for layer in world.learner.rank.model.hf.model.layers:  # type: ignore[attr-defined]
        layer.self_attn.scaling /= 2
    with pytest.raises(ConfigError, match="The learner computes another model with them"):
        world.compare()


@pytest.mark.parametrize("token_ids", [[], [-1], [384], [3] * CONTEXT])
def test_outputs_of_modules_need_the_tokens_of_a_prompt(token_ids: list[int], open_world: Open, folder: Path) -> None:
    world = open_world(folder)
    clients = SGLangClients(Vocabulary(world.model.vocabulary, str), reports_modules=True)
    with pytest.raises(EngineError, match=f"input_ids must be a list of 1 to {CONTEXT - 1} token ids"):
        asyncio.run(clients.module_outputs(SGLangClient(world.url), token_ids))
