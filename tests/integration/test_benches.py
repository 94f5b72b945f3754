"""``agentrl bench weights`` and ``bench efficiency`` on a tiny random model and the embedded engine; ``runners``, ``gateway``."""

import re

import pytest

from agentrl.cli.main import main
from benchmarks.gateway import PATHS


def rows(text: str, width: int) -> list[list[str]]:
    """Return the lines of a table that begin with the model or a number; those of the progress begin with ``N s:``."""
    lines = [re.split(r"[\s│]+", line.strip(" │")) for line in text.splitlines()]
    lines = [line for line in lines if len(line) >= width and line[1] != "s:"]
    return [line for line in lines if line[0] == "tiny" or line[0].isdigit()]


@pytest.mark.long
def test_weights_by_every_transport_that_a_cpu_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Checksums tell that the engine has what the learner had, by each of them."""
    options = "--sizes tiny --buckets 1,4 --repeats 1"
    config = "sampler.backend=embedded sampler.embedded.dtype=bfloat16 weights.check=checksum"
    code = main(["bench", "weights", *options.split(), *config.split()])
    text = capsys.readouterr().out
    assert code == 0
    table = rows(text, 8)
    assert [line[1:3] for line in table] == [
        [way, size] for way in ("distributed", "tensor", "disk", "delta") for size in ("1", "4")
    ]
    for line in table:
        total, gather, pack, request, load = (float(value) for value in line[4:9])
        assert min(gather, request, load) >= 0
        assert pack > 0
        assert gather + pack + load <= total + 2
        assert (len(line) > 10) == (line[1] == "distributed"), "a plain broadcast is beside that alone"


def test_efficiency_with_the_embedded_engine(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--size tiny --episodes 6 --concurrency 4 --turns 2 --new-tokens 8 --prompt-tokens 24 --repeats 1"
    code = main(["bench", "efficiency", *options.split(), "--observation-tokens", "8", "sampler.backend=embedded"])
    text = capsys.readouterr().out
    assert code == 0
    assert [line[1] for line in rows(text, 5)] == ["synchronous", "bare", "asynchronous"]
    ratios = re.search(r"efficiency (\d+\.\d+) synchronous, (\d+\.\d+) asynchronous:", text)
    assert ratios is not None
    assert min(map(float, ratios.groups())) > 0


@pytest.mark.long
def test_runners_by_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--runners 0,1 --episodes 8 --concurrency 8 --turns 2 --new-tokens 8 --prompt-tokens 24"
    code = main(["bench", "runners", *options.split(), "--observation-tokens", "8"])
    text = capsys.readouterr().out
    assert code == 0
    in_driver, in_runner = ([float(cell) for cell in line[:7]] for line in rows(text, 7))
    assert (in_driver[0], in_runner[0]) == (0, 1)
    assert min(in_driver[1], in_runner[1]) > 0
    assert in_driver[3] == 0 < in_runner[3], "only a pass with runners has CPU time of theirs"
    assert min(in_driver[5], in_runner[5]) > 0


@pytest.mark.long
def test_turns_of_the_gateway_beside_those_of_the_runner(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--sessions 3 --episodes 4 --turns 2 --new-tokens 8 --prompt-tokens 24 --observation-tokens 8"
    assert main(["bench", "gateway", *options.split()]) == 0
    text = capsys.readouterr().out
    number, after = r"([\d.]+)", r"(?:, first byte ms, median ([\d.]+), p95 [\d.]+)?$"
    pattern = rf"sessions 3, client (.*), turns 8, CPU ms/turn {number}, of the runner's {number}{after}"
    passes = re.findall(pattern, text, re.MULTILINE)
    assert [client for client, *_ in passes] == list(PATHS)
    assert all(float(cpu) > 0 for _, cpu, _, _ in passes)
    assert float(passes[0][2]) == 1
    assert [bool(first_byte) for *_, first_byte in passes] == [False] + [True] * 6, "only clients read a first byte"
