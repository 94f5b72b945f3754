"""The dashboard in a real browser: every view, live, by keys, on narrow screens, with hostile texts."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from urllib.parse import urlencode

import pytest
import uvicorn
from run_folders import (
    EVIL,
    add_metrics,
    record,
    rollout,
    step_metrics,
    write_config,
    write_league,
    write_metrics,
    write_synthetic_rollouts,
)

from agentrl.dashboard.app import make_app
from agentrl.dashboard.runs import Runs
from agentrl.obs.rollouts import RolloutFile
from agentrl.toolserver.server.server import UVICORN, Server, listen

pytestmark = pytest.mark.browser

MANY, TOKENS = 10_000, 300
OPEN_MS = 60_000
"""Generous: the figures are printed."""
VIEWS = ("runs", "curves", "steps", "rollouts", "groups", "compare", "league", "cluster", "advice")
HOSTILE_RUN = f"run {EVIL.replace('/', '|')}"


def serve(root, token=None):
    """Serve the runs under a folder from a thread; return the address and a function that ends it."""
    listener = listen("127.0.0.1", 0)
    stopping = threading.Event()
    server = Server(uvicorn.Config(make_app(Runs(root), token, stopping), **UVICORN))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()

    def stop():
        stopping.set()
        server.should_exit = True
        thread.join()
        listener.close()

    return f"http://127.0.0.1:{listener.getsockname()[1]}", stop


@pytest.fixture(scope="module")
def root(tmp_path_factory, tokenizer):
    """Two runs that learn, one of self-play, and a hostile one."""
    root = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("first", "second")):
        write_config(root / name, seed)
        write_metrics(root / name, 30, seed)
    (root / HOSTILE_RUN).mkdir()
    record(root / HOSTILE_RUN, tokenizer)
    for name in ("first", "second"):
        shutil.copytree(root / HOSTILE_RUN / "rollouts", root / name / "rollouts")
    write_league(root / "first", 20)
    logs = root / "first" / "logs"
    logs.mkdir()
    (logs / "engine-0.log").write_text(f"the engine is ready\n{EVIL}\n")
    add_metrics(root / HOSTILE_RUN, 4, **{EVIL: 1.0, "time/step_s": 1.0, "time/rollout_s": 1.0})
    (root / HOSTILE_RUN / "end.json").write_text('{"error": "Error", "message": "<img src=x>", "time": 1}')
    write_config(root / "flat")
    write_metrics(root / "flat", 30, **{"train/flat_groups": 1.0, "train/reward": 0.0})
    return root


@pytest.fixture(scope="module")
def address(root):
    address, stop = serve(root)
    yield address
    stop()


@pytest.fixture
def window(browser):
    """A window that is held to no error, no request to another server, and no hostile effect in the end."""
    window = browser.new_page(viewport={"width": 1440, "height": 900})
    faults, requests = [], []
    window.on("pageerror", lambda error: faults.append(str(error)))
    window.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    window.on("request", lambda request: requests.append(request.url))
    window.faults = faults
    yield window
    assert faults == []
    assert all(url.startswith(("http://127.0.0.1:", "data:,", "about:")) for url in requests), requests
    assert window.evaluate("window.hacked") is None
    assert window.locator("img").count() == 0
    window.close()


def visit(window, address, view, run="first", **place):
    """Open a view, and wait until it is drawn."""
    window.goto("about:blank")
    window.goto(f"{address}/#{urlencode({'view': view, 'run': run, **place})}")
    window.wait_for_selector(f'html[data-ready^="{view} "]', state="attached")


def open_first(window):
    window.wait_for_selector('.grid[data-complete="true"]')
    window.keyboard.press("Escape")  # leaves a field
    window.keyboard.press("j")
    window.wait_for_selector("#right h2")


def test_runs_are_listed_and_filtered(window, address):
    visit(window, address, "runs")
    rows = window.locator("tbody tr")
    assert rows.count() == 4
    window.keyboard.press("/")
    window.keyboard.type("sec")
    assert window.locator("tbody th").all_inner_texts() == ["second"]
    window.locator("tbody input").check()
    window.keyboard.press("Escape")
    window.get_by_text("Curves of the chosen runs").click()
    window.wait_for_selector('html[data-ready^="curves "]', state="attached")
    assert window.locator(".choices").first.locator("input:checked").count() == 2


def test_curves_of_several_runs_are_in_the_same_charts(window, address):
    visit(window, address, "curves", runs="second")
    charts = window.locator(".chart")
    assert charts.locator("figcaption").all_inner_texts()[:3] == ["train/reward", "eval/reward", "train/entropy"]
    assert charts.first.locator(".plot").get_attribute("data-points") == "60"
    assert charts.first.locator("canvas").count() == 1
    charts.first.locator("summary").click()
    assert charts.first.locator("details tbody th").all_inner_texts() == ["first", "second"]
    window.get_by_label("Filter metrics").fill("host_memory/trainer")
    window.locator(".choices label", has_text="host_memory/trainer_gib").locator("input").check()
    window.wait_for_function("() => document.querySelectorAll('.chart').length === 7")
    assert "host_memory" in window.evaluate("location.hash")


def test_the_time_of_a_step_and_why_engines_were_idle(window, address):
    visit(window, address, "steps")
    assert window.locator(".step-line").count() == 30
    window.locator(".step-line button").first.focus()
    window.keyboard.press("Enter")
    window.wait_for_selector(".step-detail h2")
    text = window.locator(".step-detail").inner_text()
    assert "Step 30" in text
    assert "episodes waited for tools or environments" in text
    assert window.locator(".step-line").first.locator(".parts").count() == 2


def test_a_rollout_token_by_token(window, address):
    visit(window, address, "rollouts", run=HOSTILE_RUN)
    open_first(window)
    window.get_by_label("prompt", exact=True).fill("task-2-0")
    window.wait_for_selector('.grid[data-matching="4"]')
    open_first(window)
    window.wait_for_function("() => document.querySelector('#right h2').innerText.startsWith('2/0')")
    window.locator("#text .t.w1").first.hover()
    facts = {
        name: window.locator(f'#tip [data-fact="{name}"] dd').inner_text()
        for name in ("who", "mask", "logprob", "version", "advantage", "request")
    }
    assert facts == {
        "who": "sampled in turn 1",
        "mask": "1, trained on",
        "logprob": "−0.5000 p 0.607",
        "version": "1",
        "advantage": "−0.500",
        "request": "2/0/first",
    }
    window.keyboard.press("2")
    assert window.locator("body").get_attribute("data-mode") == "logprob"
    window.keyboard.press("g")
    window.wait_for_selector(".columns")
    assert "4 rollouts, 2 different" in window.locator(".group-line").inner_text()
    hash = window.evaluate("location.hash")
    window.goto("about:blank")
    window.goto(f"{address}/{hash}")
    window.wait_for_selector(".columns")
    assert window.locator("body").get_attribute("data-mode") == "logprob", "a link shows it again"


def test_tool_calls_stand_beside_the_rollout(window, tmp_path, tokenizer):
    write_config(tmp_path / "run")
    call = f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{EVIL}"}}}}\n</tool_call>'
    RolloutFile(tmp_path / "run" / "rollouts" / "step_000001.jsonl").write(
        rollout(tokenizer, 1, 0, ["I think.", "seen", call])
    )
    address, stop = serve(tmp_path)
    try:
        visit(window, address, "rollouts", run="run")
        open_first(window)
        window.wait_for_selector(".calls li")
        assert window.locator(".calls li").all_inner_texts() == [f'turn 2 search {{"query":"{EVIL}"}}']
    finally:
        window.goto("about:blank")
        stop()


@pytest.mark.parametrize("view", VIEWS)
def test_hostile_texts_are_texts(window, address, view):
    run = "first" if view == "league" else HOSTILE_RUN
    visit(window, address, view, run=run, keys=EVIL, step=4, other=HOSTILE_RUN if view == "compare" else "")
    if view in ("rollouts", "groups"):
        if view == "rollouts":
            window.get_by_label("ended").select_option("max_turns")
            window.wait_for_selector('.grid[data-matching="1"]')
        open_first(window)
        window.wait_for_selector("#text, .columns")
        assert EVIL in window.locator("#text, .columns").inner_text().replace("\n", "")
    if view == "cluster":
        visit(window, address, view, run="first")
        window.get_by_text("engine-0.log").click()
        window.wait_for_selector(".log:not([hidden])")
        assert EVIL in window.locator(".log").inner_text()
    assert window.locator("#view script").count() == 0
    assert window.locator("#view b").get_by_text("bold", exact=True).count() == 0


def test_filters_search_and_sorting_are_the_server_s(window, address):
    visit(window, address, "rollouts", run=HOSTILE_RUN)
    window.wait_for_selector('.grid[data-complete="true"]')
    assert "24 rollouts" in window.locator(".filters").inner_text()
    window.keyboard.press("/")
    window.keyboard.type("search is gone")
    window.wait_for_selector('.grid[data-matching="1"]')
    open_first(window)
    window.wait_for_selector(".failure")
    assert "tool failure · ToolFailure" in window.locator(".failure").first.inner_text()
    window.get_by_label("Search").fill("")
    window.wait_for_selector('.grid[data-matching="24"]')
    window.locator(".slick-header-column", has_text="reward").click()
    window.wait_for_function("() => location.hash.includes('sort=reward')")
    window.wait_for_function("() => document.querySelector('.slick-row .slick-cell:nth-child(2)').textContent === '0'")
    window.get_by_label("steps", exact=True).fill("3:3")
    window.wait_for_selector('.grid[data-matching="8"]')


def test_groups_and_two_runs_side_by_side(window, address):
    visit(window, address, "groups")
    window.wait_for_selector('.grid[data-matching="6"]')
    open_first(window)
    window.wait_for_selector(".columns")
    visit(window, address, "compare", other="flat")
    assert "train.flat" not in window.locator(".compare-tables").inner_text()
    window.get_by_label("The other run").select_option("second")
    window.wait_for_function("() => document.querySelector('.compare-tables')?.innerText.includes('run.seed')")
    window.get_by_text("side by side").first.click()
    window.wait_for_selector(".compared .columns")
    names = " ".join(window.locator(".compared .ids button").all_inner_texts())
    assert "first · " in names
    assert "second · " in names


def test_self_play_cluster_and_advice(window, address):
    visit(window, address, "league")
    assert window.locator("tr.here th").first.inner_text() == "policy"
    assert window.locator(".payoff").count() > 4
    visit(window, address, "cluster")
    assert "engine-0.log" in window.locator(".cards").inner_text()
    assert "sampler.backend" in window.locator(".cards").inner_text()
    visit(window, address, "advice", run="flat")
    assert window.locator(".finding.problem").count() >= 1
    assert window.locator(".finding .do code").count() >= 1


def test_everything_is_reached_by_keys(window, address):
    visit(window, address, "runs")
    for key, view in (
        ("c", "curves"),
        ("t", "steps"),
        ("p", "groups"),
        ("d", "compare"),
        ("e", "cluster"),
        ("v", "advice"),
        ("l", "rollouts"),
    ):
        window.keyboard.press(key)
        window.wait_for_selector(f'html[data-ready^="{view} "]', state="attached")
        assert window.locator("#tabs [aria-current]").count() == 1
    window.wait_for_selector('.grid[data-complete="true"]')
    window.keyboard.press("j")
    window.wait_for_selector("#right h2")
    first = window.locator("#right h2").inner_text()
    window.keyboard.press("j")
    window.wait_for_function("text => document.querySelector('#right h2').innerText !== text", arg=first)
    window.keyboard.press("ArrowUp")
    window.wait_for_function("text => document.querySelector('#right h2').innerText === text", arg=first)
    window.keyboard.press("?")
    assert window.locator("dialog[open]").count() == 1
    window.keyboard.press("Escape")
    assert window.locator("dialog[open]").count() == 0


@pytest.mark.parametrize("view", VIEWS)
def test_controls_have_names_and_texts_have_contrast(window, address, view):
    visit(window, address, view, step=3)
    if view in ("rollouts", "groups"):
        open_first(window)
    unnamed = window.evaluate(
        """() => [...document.querySelectorAll('button, a[href], input, select, [role="grid"], main, nav')].filter((element) => {
          const name = element.getAttribute('aria-label') || element.labels?.[0]?.innerText || element.innerText || element.title;
          return element.checkVisibility() && !(name ?? '').trim() && !['MAIN'].includes(element.tagName);
        }).map((element) => element.outerHTML.slice(0, 120))"""
    )
    assert unnamed == []
    for scheme in ("light", "dark"):
        window.emulate_media(color_scheme=scheme)
        lightness = window.evaluate(
            """() => ['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3)
              .reduce((sum, value) => sum + Number(value), 0))"""
        )
        assert (lightness[0] < lightness[1]) == (scheme == "light")
        assert abs(lightness[0] - lightness[1]) > 400
    window.wait_for_selector(f'html[data-ready^="{view} "]', state="attached")


@pytest.mark.parametrize("view", VIEWS)
def test_narrow_screens(window, address, view):
    window.set_viewport_size({"width": 390, "height": 800})
    visit(window, address, view, step=3)
    width = window.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    if view in ("rollouts", "groups"):
        window.wait_for_selector('.grid[data-complete="true"]')
        window.locator(".slick-row").first.click()
        window.wait_for_selector("#right h2")
        assert window.locator(".grid").is_hidden()
        assert window.evaluate("document.documentElement.scrollWidth") <= 390
        window.get_by_text("← table").click()
        assert window.locator(".grid").is_visible()


def test_off_the_loopback_the_token_is_asked_for_once(browser, root):
    token = "0123456789abcdef0123"
    address, stop = serve(root, token)
    try:
        window = browser.new_page()
        window.goto(address)
        assert window.url == f"{address}/login"
        window.get_by_label("Token").fill("wrong")
        window.keyboard.press("Enter")
        window.get_by_text("This is not the token").wait_for()
        window.get_by_label("Token").fill(token)
        window.keyboard.press("Enter")
        window.wait_for_selector("tbody tr")
        assert window.evaluate("document.cookie") == "", "scripts do not see the cookie"
        window.reload()
        window.wait_for_selector("tbody tr")
        window.context.clear_cookies()
        window.close()
    finally:
        stop()


def test_what_a_run_writes_is_on_the_page_within_the_step(window, tmp_path, tokenizer, capsys):
    folder = tmp_path / "run"
    write_config(folder)
    write_metrics(folder, 3)
    file = RolloutFile(folder / "rollouts" / "step_000004.jsonl")
    file.write(rollout(tokenizer, 4, 0, ["a", "b", "c"]))
    address, stop = serve(tmp_path)
    try:
        visit(window, address, "curves", run="run", keys="train/reward")
        window.wait_for_selector('#live[data-state="live"]')
        window.wait_for_selector('.plot[data-points="3"]')
        seconds = []
        for step in range(4, 9):
            begun = time.perf_counter()
            add_metrics(folder, step, **step_metrics(step, 0))
            window.wait_for_selector(f'.plot[data-points="{step}"]')
            seconds.append(time.perf_counter() - begun)
        visit(window, address, "rollouts", run="run")
        window.wait_for_selector('.grid[data-matching="1"]')
        window.wait_for_selector('#live[data-state="live"]')
        begun = time.perf_counter()
        file.write([rollout(tokenizer, 4, number, ["a", "b", "c"]) for number in (1, 2, 3)])
        window.wait_for_selector('.grid[data-matching="4"]')
        rollouts_s = time.perf_counter() - begun
        with (folder / "metrics.jsonl").open("a") as broken:
            broken.write('{"step": 9, "train/rew')
        file.write(rollout(tokenizer, 4, 4, ["a", "b", "c"]))
        window.wait_for_selector('.grid[data-matching="5"]')
    finally:
        stop()
        window.faults.clear()  # the page notices that its server is gone
    with capsys.disabled():
        print(f"\ndashboard: a step is shown within {max(seconds):.2f} s, rollouts within {rollouts_s:.2f} s")


def test_ten_thousand_rollouts(window, tmp_path, capsys):
    """By the command of users, in a process of its own: it ends by Ctrl-C."""
    write_config(tmp_path / "many")
    write_metrics(tmp_path / "many", 79)
    write_synthetic_rollouts(tmp_path / "many", MANY, TOKENS)
    command = [sys.executable, "-m", "agentrl.cli.main", "view", str(tmp_path), "--serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "400"})
    try:
        assert server.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        assert match
        address = match[0]
        figures = {}
        for kind in ("cold", "again"):
            window.goto("about:blank")
            begun = time.perf_counter()
            window.goto(f"{address}/#view=rollouts&run=many")
            window.wait_for_selector(".grid .slick-row .number")
            figures[f"first rows, {kind}"] = time.perf_counter() - begun
            window.wait_for_selector(f'.grid[data-complete="true"][data-matching="{MANY}"]', timeout=OPEN_MS)
            figures[f"all {MANY:,}, {kind}"] = time.perf_counter() - begun
        paint_ms = window.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        begun = time.perf_counter()
        window.keyboard.press("j")
        window.wait_for_selector("#text .t")
        figures["open a rollout"] = time.perf_counter() - begun
        begun = time.perf_counter()
        window.locator(".slick-viewport-top.slick-viewport-left").evaluate(
            "area => { area.scrollTop = area.scrollHeight; }"
        )
        window.wait_for_function(
            "() => [...document.querySelectorAll('.slick-row')].some((row) => row.textContent.includes('1/127'))"
        )
        figures["scroll to the end"] = time.perf_counter() - begun
        begun = time.perf_counter()
        window.get_by_label("sort by").select_option("reward")
        window.wait_for_function(
            "() => location.hash.includes('sort=reward') && document.querySelector('.slick-row .up')?.textContent === '1'"
        )
        figures["sort"] = time.perf_counter() - begun
        begun = time.perf_counter()
        window.get_by_label("Search").fill("question 77 of")
        window.wait_for_selector('.grid[data-matching="8"][data-complete="true"]', timeout=OPEN_MS)
        figures["search all texts"] = time.perf_counter() - begun
        assert window.locator(".slick-row").count() < 100, "only what is seen is drawn"
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
        window.faults.clear()
    with capsys.disabled():
        print(
            f"\ndashboard: first contentful paint {paint_ms:.0f} ms, "
            + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in figures.items())
        )
