"""Two tensor-parallel ranks of SGLang load buckets that only the first has received, or has fetched."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentrl.distributed import sglang_loader
from agentrl.distributed.flat_bucket import join_tensors
from agentrl.distributed.payload_server import PayloadServer
from agentrl.distributed.sglang_loader import BUCKET_LOADER, LOADER
from agentrl.distributed.sglang_loader.agentrl_weight_loaders import encode_changes, encode_whole
from agentrl.inference.launch import cpu_sglang
from agentrl.learner.export import NamedTensors, WeightExporter
from agentrl.models.load import load_model
from tests.unit.learner.megatron.models import make_model

pytestmark = pytest.mark.sglang

SCRIPT = Path(__file__).parent / "load_by_rank.py"
RANKS = 2


def test_both_ranks_have_the_weights_that_the_first_has_received(sglang_python: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    learner, buckets = WeightExporter(NamedTensors(dict(load_model(folder).named_parameters()))), []
    exits, server = ExitStack(), PayloadServer("127.0.0.1")
    exits.callback(server.close)
    for number, bucket in enumerate(learner.buckets(16_384)):
        flat, specs = join_tensors(bucket.tensors())
        whole = encode_whole(flat, [(spec.name, spec.dtype, spec.shape) for spec in specs])
        changes = encode_changes(bucket.changes(None, "a"), base=None, held="a", number=number, last=bucket.last)
        for index, (load_format, encoded) in enumerate(((BUCKET_LOADER, whole), (LOADER, changes))):
            fetched = number % 2 == index
            url = exits.enter_context(server.serve(encoded.payload.numpy().data)).url if fetched else ""
            entries = encoded.by_rank(RANKS, url)
            buckets.append({"load_format": load_format, "serialized_named_tensors": entries})
            assert len(entries[1]) < len(encoded.first) / 4
    assert len(buckets) > 6
    (tmp_path / "buckets.json").write_text(json.dumps(buckets))
    environment = os.environ | cpu_sglang.environment() | {"SGLANG_USE_CPU_ENGINE": "1"}
    path = [environment["PYTHONPATH"].split(os.pathsep)[0], str(Path(sglang_loader.__file__).parent)]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [sglang_python, SCRIPT, folder, tmp_path / "buckets.json"]
    with exits:
        result = subprocess.run(command, env=environment, check=True, timeout=200, stdout=subprocess.PIPE, text=True)
    assert json.loads(result.stdout.splitlines()[-1]) == [{BUCKET_LOADER: [], LOADER: []}] * RANKS
