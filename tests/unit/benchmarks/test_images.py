"""`agentrl bench images`: episodes with pictures and of text have as many tokens, and the learner trains both."""

import pytest

from benchmarks.images import ImageBench, sample_episodes, train_rows
from tests.vision_folders import write_processor_folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ImageBench:
    folder = write_processor_folder(tmp_path_factory.mktemp("model"), "qwen3-vl", weights=0.02)
    return ImageBench(folder, episodes=2, pictures=5, side_px=32, threads=1)


def test_pictures_and_text_have_as_many_tokens(bench: ImageBench) -> None:
    pictures, text = (sample_episodes(bench, kind) for kind in (True, False))
    assert pictures.tokens == text.tokens
    assert (len(pictures.images), len(text.images)) == (10, 0)
    assert [len(row.images) for row in pictures.rows] == [5, 5]
    assert [int(row.mask.sum()) for row in pictures.rows + text.rows] == 4 * [32]
    for cost in (pictures, text):
        assert train_rows(bench, cost.rows, cost.images).tokens == cost.tokens
