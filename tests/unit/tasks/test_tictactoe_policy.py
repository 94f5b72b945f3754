"""The shipped policy of tic-tac-toe: small, reads a row of the observation as one token, and makes legal moves."""

from pathlib import Path

import pytest
import torch
from agentrl_envs.tictactoe import lines_text
from agentrl_tasks.game_positions import GamePositions
from agentrl_tasks.game_positions.make_policy import main

from agentrl import Message
from agentrl.core.registry import model_folder
from agentrl.models.load import load_model, load_tokenizer
from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer


@pytest.fixture(scope="module")
def folder() -> Path:
    actual_model_folder = model_folder("tictactoe-warm")
    assert actual_model_folder is not None
    return actual_model_folder


@pytest.fixture(scope="module")
def renderer(folder: Path) -> ChatRenderer:
    return make_renderer(load_tokenizer(folder))


def test_it_is_small(folder: Path) -> None:
    assert sum(weight.numel() for weight in load_model(folder).parameters()) <= 600_000
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2_000_000


@pytest.mark.long
def test_the_recipe_makes_its_tokenizer_and_architecture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make_policy", str(tmp_path)])
    main()
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    made, shipped = load_model(tmp_path), load_model(folder)
    assert {k: v.shape for k, v in made.state_dict().items()} == {k: v.shape for k, v in shipped.state_dict().items()}


def test_a_row_is_the_same_token_and_a_digit_in_the_observation_and_in_the_answer(renderer: ChatRenderer) -> None:
    """Layout of the end of a row: newline | lines | number."""
    prompt = renderer.render((Message("user", lines_text("X.O.X....", "O")),)).token_ids
    newline = prompt[-1]
    for row in ("+--_2", "-_-_4", "+-__-_7", "__-_8", "__+_--9"):
        lines, number = renderer.encode(row)
        assert any(prompt[i : i + 3] == (newline, lines, number) for i in range(len(prompt))), row


def test_its_moves_are_legal(folder: Path, renderer: ChatRenderer) -> None:
    """The probability of a legal move and an end token, exactly, in the mean over positions of random play."""
    model = load_model(folder).float().eval()
    taskset = GamePositions("tictactoe", {"show_lines": True}, seed=5)
    actual = []
    for task in taskset.split("eval")[:60]:
        prompt = renderer.render(task.prompt).token_ids
        moves = [(*renderer.encode(move), renderer.end_token_id) for move in task.metadata["legal_moves"]]
        with torch.inference_mode():
            logits_M_3_V = model(torch.tensor([(*prompt, *move) for move in moves])).logits[:, len(prompt) - 1 : -1]
        chosen_M_3 = logits_M_3_V.log_softmax(-1).gather(-1, torch.tensor(moves)[..., None]).squeeze(-1)
        actual.append(float(chosen_M_3.sum(-1).exp().sum()))
    assert sum(actual) / len(actual) > 0.95
