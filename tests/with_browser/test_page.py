"""The page of `agentrl view --html` in a real browser: made by the command line, opened, read and clicked."""

import dataclasses
import json

import pytest
from run_folders import EVIL, PICTURE, record, rollout
from shared_runs import here

from agentrl.core.types import (
    FinishReason,
    RowKey,
    SeatRecord,
    Turn,
)
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.obs.viewer.page import build_page, write_page
from benchmarks.viewer import synthetic_entries, synthetic_texts

pytestmark = pytest.mark.browser

OPEN_MS = 30_000
"""Generous: the figure is printed, and `agentrl bench view` measures it on a quiet machine."""


@pytest.fixture(scope="module")
def page(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("run") / f"run {EVIL.replace('/', '|')}"
    record(folder, tokenizer)
    done = here("view", str(folder), "--html", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "24 rollouts" in done.stdout
    return folder / "view.html"


@pytest.fixture
def opened(browser, request):
    """Opens a page with a hash, and holds it to no error, no request and no hostile effect in the end."""
    page = request.getfixturevalue(getattr(request, "param", "page"))
    window = browser.new_page(viewport={"width": 1400, "height": 900})
    faults, requests = [], []
    window.on("pageerror", lambda error: faults.append(str(error)))
    window.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    window.on("request", lambda request: requests.append(request.url))

    def visit(hash=""):
        window.goto("about:blank")
        window.goto(page.as_uri() + hash)
        window.wait_for_selector("html[data-ready]", state="attached")
        return window

    yield visit
    assert faults == []
    urls = {url.partition("#")[0] for url in requests}
    assert {url for url in urls if not url.startswith("data:image/png;")} <= {page.as_uri(), "about:blank"}
    assert window.evaluate("window.hacked") is None
    assert window.locator("script").count() == 5
    window.close()


def listed(window):
    return window.locator(".line.rollout").evaluate_all("lines => lines.map(line => line.dataset.rollout)")


def fact(window, name):
    return window.locator(f'#tip [data-fact="{name}"] dd').inner_text()


def test_the_list_and_the_first_rollout_are_there(opened):
    window = opened()
    assert window.locator("#count").inner_text() == "24 rollouts"
    assert listed(window)[:3] == ["3/0", "3/1", "3/2"]
    assert window.locator("#right h2").inner_text().startswith("3/0")
    assert window.locator("#notes").is_hidden()
    assert window.locator("#curve .line").count() == 2


def test_an_image_is_shown_at_its_place(opened):
    window = opened("#r=3/1")
    image = window.locator("#text .picture img")
    assert image.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [20, 10]
    assert f"1 token · {PICTURE.digest[:12]}" in window.locator("#text .picture").inner_text()
    places = window.locator("#text .words").first.locator(":scope > *")
    assert places.evaluate_all("all => all.slice(0, 3).map(each => each.classList[0])") == ["t", "picture", "t"]


def test_hover_says_everything_of_a_token(opened):
    window = opened("#r=2/1")
    spans = window.locator("#text .t.w1")
    spans.first.hover()
    assert fact(window, "who") == "sampled in turn 1"
    assert fact(window, "mask") == "1, trained on"
    assert fact(window, "logprob").startswith("−0.5000 p 0.607")
    assert fact(window, "version") == "1"
    assert fact(window, "advantage") == "+0.500"
    assert fact(window, "request") == "2/1/first"
    spans.last.hover()
    assert fact(window, "mask") == "0: its policy version is too old"
    assert fact(window, "advantage") == "– (mask 0)"
    window.locator("#text .t.w0").first.hover()
    assert (fact(window, "who"), fact(window, "version"), fact(window, "logprob")) == ("observed", "–", "–")


def test_hostile_text_is_text(opened):
    window = opened("#r=3/0")
    text = window.locator("#text").inner_text()
    assert EVIL in text.replace("\n", "")
    assert window.locator("#text b").all_inner_texts() == ["prompt", "turn 1"]
    assert window.locator("img").count() == 0
    assert window.locator(".label-text").inner_text() == EVIL
    assert window.locator("#title").inner_text().startswith("run <|script>")


def test_characters_over_several_tokens_are_joined(opened):
    window = opened("#r=3/1")
    assert "a snow☃man 🙂 here" in window.locator("#text .by1 .words").inner_text()


def test_a_failed_rollout_shows_its_failure_and_its_text(opened):
    window = opened("#status=dropped")
    assert listed(window) == ["3/2"]
    assert "tool failure · ToolFailure" in window.locator(".failure").first.inner_text()
    assert "search is gone </script>" in window.locator(".failure pre").inner_text()
    assert "Question 0" in window.locator("#text .by0").inner_text()


def test_filters_and_sorting(opened):
    window = opened()
    window.get_by_label("reward from").fill("1")
    window.get_by_label("reward from").press("Enter")
    assert window.locator("#count").inner_text() == "12 of 24"
    window.get_by_label("step from").fill("3")
    window.get_by_label("step from").press("Enter")
    assert listed(window) == ["3/1", "3/3", "3/5", "3/7"]
    window.locator("#clear").click()
    window.locator(".chip", has_text="max turns").click()
    assert listed(window) == ["3/0"]
    window.keyboard.press("x")
    window.locator("#sort").select_option("reward")
    assert listed(window)[0] == "1/1"
    window.locator("#direction").click()
    assert listed(window)[0] == "1/0"


def test_search_reads_the_tokens(opened):
    window = opened()
    window.keyboard.press("/")
    window.keyboard.type("Snow☃Man")
    window.wait_for_selector("#list[data-shown='1']")
    assert listed(window) == ["3/1"]
    window.keyboard.press("Enter")
    window.wait_for_selector("#right[data-rollout='3/1']")
    assert "☃" in "".join(window.locator("#text .hit").all_inner_texts())


def test_a_click_on_the_curve_filters_to_its_step(opened):
    window = opened()
    box = window.locator("#curve").bounding_box()
    window.mouse.click(box["x"] + box["width"] - 12, box["y"] + 40)
    assert window.locator("#count").inner_text() == "8 of 24"
    assert all(name.startswith("3/") for name in listed(window))


def test_groups_side_by_side(opened):
    window = opened("#r=2/4&view=group")
    assert "4 rollouts, 2 different" in window.locator(".group-line").inner_text()
    columns = window.locator(".column")
    assert columns.count() == 2
    assert columns.nth(0).locator(".ids button").all_inner_texts() == ["2/4", "2/6"]
    assert "".join(columns.nth(0).locator(".differs").all_inner_texts()).strip() == "0"
    assert "".join(columns.nth(1).locator(".differs").all_inner_texts()).strip() == "1"
    columns.nth(1).locator(".ids button").first.click()
    window.wait_for_selector("#right[data-rollout='2/5'] #text")


def game(tokenizer, episode, seat, turns, **changes):
    """A rollout of a game, with a row a turn: what the agent reads, then what it says."""
    agent = f"player_{seat}"
    first_game = rollout(tokenizer, 1, 0, ["x"])
    rows = []
    for number, (read, action) in enumerate(turns):
        row = rollout(tokenizer, 1, 0, [action], prompt=read).rows[0]
        key = RowKey("game", f"{episode}.{agent}", agent, number)
        rows.append(dataclasses.replace(row, key=key, request_ids=(f"{episode}.{agent}/{number}",)))
    seat_fields = {"agent": agent, "role": ("first", "second")[seat], "seat": seat, "episode": episode, "rows": rows}
    turns = [Turn(action, "", FinishReason.STOP) for _, action in turns]
    seat_fields |= {"turns": turns, "prompt_id": "game", "rollout_id": f"{episode}.{agent}"}
    return dataclasses.replace(first_game, **(seat_fields | changes))


@pytest.fixture(scope="module")
def games_page(tmp_path_factory, tokenizer):
    """A game of the policy against itself, and one against a hostile scripted player."""
    folder = tmp_path_factory.mktemp("games")
    mirror = tuple(
        SeatRecord(f"player_{seat}", role, "policy", trained=True, steps=steps)
        for seat, (role, steps) in enumerate((("first", (0, 2)), ("second", (1,))))
    )
    fixed = (
        SeatRecord("player_0", "first", f"random {EVIL}", trained=False, steps=(0, 2), moves=(EVIL, "fold")),
        dataclasses.replace(mirror[1], steps=(1,)),
    )
    played = {"opponent": "mirror", "seat_rewards": (1.0, -1.0), "seats": mirror}
    token_ids = [
        game(tokenizer, "e1", 0, [("Your card is K.", "check"), ("They bet.", "call")], reward=1.0, **played),
        game(tokenizer, "e1", 1, [("Your card is Q.", "bet")], reward=-1.0, **played),
        game(
            tokenizer, "e2", 1, [("Your card is J.", "check")], reward=-1.0, seats=fixed, seat_rewards=(1.0, -1.0),
            opponent="fixed:random",
        ),
    ]  # fmt: skip
    recorder = RolloutRecorder(folder / "rollouts")
    recorder.write(1, token_ids)
    recorder.finish(1, {"e1.player_0": 0.5})
    (folder / "config.yaml").write_text(json.dumps({"model": {"path": "multihop-warm"}, "env": {"name": "kuhn_poker"}}))
    done = here("view", str(folder), "--html", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "view.html"


@pytest.mark.parametrize("opened", ["games_page"], indirect=True)
def test_the_agents_of_an_episode_are_side_by_side_by_steps(opened):
    window = opened("#r=e1.player_1&view=agents")
    heads = window.locator(".agents .seat").all_inner_texts()
    assert [" ".join(text.split()) for text in heads] == [
        "", "1 +0.500 player_0 first played by policy e1.player_0", "−1 player_1 second played by policy e1.player_1",
    ]  # fmt: skip
    cells = window.locator(".agents .cell[data-agent]")
    actions = [" ".join(cell.locator(".by1 .words").all_inner_texts()).strip() for cell in cells.all()]
    assert actions == ["check", "", "", "bet", "call", ""], "by step, then by agent"
    assert "They bet." in cells.nth(4).locator(".by0").inner_text()
    cells.nth(0).locator(".t.w1").first.click()
    assert fact(window, "who") == "sampled in turn 1"
    assert fact(window, "mask") == "1, trained on"
    assert fact(window, "advantage") == "+0.500"
    window.keyboard.press("Escape")
    window.keyboard.press("a")
    window.wait_for_selector("#text")


@pytest.mark.parametrize("opened", ["games_page"], indirect=True)
def test_the_moves_of_a_scripted_player_are_shown_as_text(opened):
    window = opened("#r=e2.player_1")
    window.get_by_role("tab", name="2 agents").click()
    window.wait_for_selector(".agents")
    assert window.locator(".agents .move").all_inner_texts() == [EVIL, "fold"]
    assert f"played by random {EVIL}" in window.locator(".agents .seat").nth(1).inner_text()
    assert window.locator("img").count() == 0
    assert "opponents: fixed:random" in window.locator(".group-line").inner_text()
    window.keyboard.press("k")
    window.wait_for_selector("#right[data-rollout='e1.player_1'] .agents")


def test_the_rows_of_a_rollout_are_tabs(opened):
    window = opened("#r=2/7")
    assert window.locator(".tabs.rows button").all_inner_texts() == ["main 0", "critic 1"]
    assert "say 1" in window.locator("#text").inner_text()
    window.locator(".tabs.rows button").last.click()
    window.wait_for_selector(".tabs.rows button:last-child[aria-selected=true]")
    assert "say 0" in window.locator("#text").inner_text()
    window.keyboard.press("g")
    window.wait_for_selector(".columns")
    assert "of several rows, the first" in window.locator(".group-line").inner_text()


def test_keys_links_and_colours(opened):
    window = opened("#r=1/2&sort=-reward")
    window.keyboard.press("j")
    window.wait_for_selector("#right[data-rollout='1/4']")
    window.keyboard.press("2")
    window.keyboard.press("g")
    window.wait_for_selector(".columns")
    address = window.evaluate("location.hash")
    assert "r=1%2F4" in address
    assert "color=logprob" in address
    again = opened(address)
    assert again.locator("#right").get_attribute("data-rollout") == "1/4"
    assert again.locator("body").get_attribute("data-mode") == "logprob"
    assert again.locator(".columns").count() == 1
    heat = again.locator(".columns .t.w1").first.evaluate("element => getComputedStyle(element).backgroundColor")
    assert heat not in ("rgba(0, 0, 0, 0)", "rgb(255, 255, 255)")


def test_two_thousand_rollouts_of_two_thousand_tokens(browser, tmp_path, capsys):
    entries = list(synthetic_entries(2000, 2000))
    page = build_page(entries, title="large", decode=synthetic_texts)
    assert page.tokens == 4_000_000
    write_page(tmp_path / "view.html", page)
    window = browser.new_page(viewport={"width": 1400, "height": 900})
    window.goto((tmp_path / "view.html").as_uri())
    window.wait_for_selector("html[data-ready]", state="attached", timeout=OPEN_MS)
    ready = float(window.locator("html").get_attribute("data-ready"))
    with capsys.disabled():
        print(f"\nviewer: 2,000 rollouts of 2,000 tokens open in {ready:.0f} ms ({len(page.html) / 2**20:.1f} MiB)")
    assert ready < OPEN_MS
    assert window.locator("#count").inner_text() == "2,000 rollouts"
    assert window.locator("#text .t").count() == 2000
    last = entries[-1].rollout
    window.evaluate(f"location.hash = '#r={last.rollout_id}'")
    window.wait_for_selector(f"#right[data-rollout='{last.rollout_id}'] #text")
    shown = "".join(window.locator("#text .t").evaluate_all("spans => spans.map(span => span.textContent)"))
    assert shown == "".join(synthetic_texts(last.rows[0].token_ids.tolist()))
    window.close()


def test_left_out_rollouts_are_named(browser, tmp_path, tokenizer):
    record(tmp_path, tokenizer)
    done = here("view", str(tmp_path), "--html", "out/some.html", "--max-rollouts", "8", "--steps", "2:3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8 of 16 rollouts" in done.stdout
    window = browser.new_page()
    window.goto((tmp_path / "out" / "some.html").as_uri())
    window.wait_for_selector("html[data-ready]", state="attached")
    note = window.locator("#notes").inner_text()
    assert "8 are left out (--max-rollouts 8; 0 shows all)" in note
    assert "Only --steps 2:3." in note
    assert window.locator("#count").inner_text() == "8 rollouts"
    window.close()


def test_terminal(tmp_path, tokenizer):
    record(tmp_path, tokenizer)
    done = here("view", str(tmp_path), "--steps", "3", "--reward-min", "1", "--limit", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3/1 · step 3 · task-3-0 · reward 1 · advantage +0.500" in done.stdout
    assert "a snow☃man 🙂 here" in done.stdout
    assert done.stdout.count("· step 3 ·") == 1
    nothing = here("view", str(tmp_path), "--group", "nobody", cwd=tmp_path)
    assert (nothing.returncode, "--group nobody" in nothing.stderr) == (2, True)
