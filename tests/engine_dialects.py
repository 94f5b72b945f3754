"""Episodes in every dialect with an engine: the same ids, masks, log-probabilities and rewards as in a loop, bit for bit."""

from __future__ import annotations

from functools import partial

from dialect_episodes import LIMITS, Step, TalkEnv, as_loop, check_dialects, plain
from gateway_episodes import EngineSampler, Played, play_with

from agentrl.render.renderer import ChatRenderer

EPISODES: tuple[list[Step], ...] = (
    [
        ("continue", 0, "go on"),
        ("retry", 0, "Né? 🎈"),
        ("branch", 0, "«»"),
        ("lost", 0, " white "),
        ("compact", 0, "go on"),
    ],
    [
        ("parallel", 0, "a\r\nb"),
        ("continue", 0, "go on"),
        ("subagent", 0, "Né? 🎈"),
        ("continue", 0, "«»"),
        ("title", 0, "x"),
    ],
)
"""All kinds of steps."""
LINEAR: list[Step] = [("continue", 0, text) for text in ("go on", "Né? 🎈", " white ", "«»")]


def check_engine(
    renderer: ChatRenderer, url: str, temperature: float, episodes: tuple[list[Step], ...] = EPISODES
) -> list[Played]:
    """Check episodes in every dialect, and one through an environment; return those of the loops."""

    def play(talk: object, **options: object) -> Played:
        limits = LIMITS | {"max_tokens": 6000, "max_new_tokens": 120, "max_seconds": 300.0}
        return play_with(renderer, EngineSampler(url), talk, temperature=temperature, **limits, **options)

    played = [check_dialects(play, steps) for steps in EPISODES]
    loop, environment = play(as_loop(LINEAR), is_loop=True), play(None, env=partial(TalkEnv, LINEAR))
    assert environment.rollout.failure is None, environment.rollout.failure
    assert plain(environment.rollout) == plain(loop.rollout)
    return [*played, loop]
