"""What of an agent's files is carried: unit tests on trees, without a machine."""

import io
import tarfile

import pytest

from agentrl.containers import carried_files
from agentrl.containers.archives import check
from agentrl.containers.carried_files import LEADS_OUT, Entry, find_changes, read_tree, without

FOLDER = Entry("folder", 0o755)


def text(content: str) -> Entry:
    return Entry("file", content=content.encode())


def link(target: str) -> Entry:
    return Entry("link", 0o777, target=target)


CLEAN = {
    "/app": FOLDER,
    "/app/a.txt": text("a"),
    "/app/conftest.py": text("fixtures"),
    "/app/old": FOLDER,
    "/app/old/b.txt": text("b"),
    "/app/pyproject.toml": text('[tool.pytest.ini_options]\naddopts = "-q"\n[project]\nname = "x"\n'),
    "/app/venv": FOLDER,
    "/app/venv/pyvenv.cfg": text("home = /usr"),
    "/app/package": FOLDER,
    "/app/package/__init__.py": text(""),
}


def test_changes_are_carried_and_nothing_else() -> None:
    agent = {path: entry for path, entry in CLEAN.items() if not path.startswith("/app/old")} | {
        "/app/a.txt": text("changed"),
        "/app/new": FOLDER,
        "/app/new/c.txt": text("c"),
        "/app/inner": link("new/c.txt"),
    }
    changes = find_changes(agent, CLEAN, ["/app"])
    assert set(changes.entries) == {"/app/a.txt", "/app/new", "/app/new/c.txt", "/app/inner"}
    assert changes.removed == ("/app/old",)
    assert not changes.refused
    with tarfile.open(fileobj=io.BytesIO(changes.archive(1000, 100))) as archive:
        members = {member.name: member for member in archive}
        assert {(member.uid, member.gid) for member in members.values()} == {(1000, 100)}
        content = archive.extractfile("app/a.txt")
        assert content is not None
        assert content.read() == b"changed"
        assert members["app/inner"].linkname == "new/c.txt"


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/app/sub/conftest.py",
            "/app/sitecustomize.py",
            "/app/x.pth",
            "/app/pytest.ini",
            "/app/__pycache__/a.cpython-311.pyc",
        ),
        *("/app/.git/hooks/pre-commit", "/app/.git/config", "/app/.git/modules/m/hooks/post-checkout", "/app/.git"),
        *(
            "/app/node_modules/x/index.js",
            "/app/lib/site-packages/x.py",
            "/app/venv/bin/python",
            "/app/x.dist-info/entry_points.txt",
        ),
        *(
            "/app/json.py",
            "/app/pytest.py",
            "/app/_pytest/runner.py",
            "/app/random.cpython-311-x86_64-linux-gnu.so",
            "/app/bin/ls",
        ),
        "/app/.bashrc",
    ],
)
def test_code_that_tools_load_by_themselves_is_not_carried_unless_the_task_names_it(path: str) -> None:
    agent = {**CLEAN, path: text("x")}
    changes = find_changes(agent, CLEAN, ["/app"], search_folders=["/app/bin"])
    assert set(changes.refused) == {path}
    assert not changes.entries
    assert set(find_changes(agent, CLEAN, ["/app"], named=[path], search_folders=["/app/bin"]).entries) == {path}


@pytest.mark.parametrize(
    "path", ["/app/package/json.py", "/app/main.py", "/app/.git/objects/ab/cd", "/app/hooks/run.py", "/app/json"]
)
def test_ordinary_files_are_carried(path: str) -> None:
    assert set(find_changes({**CLEAN, path: text("x")}, CLEAN, ["/app"]).entries) == {path}


def test_a_bare_repository_has_no_settings_of_the_agent() -> None:
    bare = {f"/app/data/{name}": text("x") for name in ("HEAD", "objects/1", "refs/2", "config", "hooks/update")}
    folders = {f"/app/data/{name}": FOLDER for name in ("objects", "refs")}
    changes = find_changes({**CLEAN, **folders, **bare}, CLEAN, ["/app"])
    assert set(changes.refused) == {"/app/data/config", "/app/data/hooks/update"}


def test_a_bare_repository_in_another_ones_hooks_hides_nothing() -> None:
    outer = {f"/app/r/{part}": text("") for part in ("HEAD", "objects", "refs")}
    inner = {f"/app/r/hooks/{part}": text("") for part in ("HEAD", "objects", "refs", "pre-commit")}
    changes = find_changes(CLEAN | outer | inner, CLEAN, ["/app"])
    assert set(changes.refused) == set(inner)


def test_many_files_in_a_folder_with_the_name_of_a_module_are_looked_at_once() -> None:
    names = [f"/app/json/{number}.txt" for number in range(20_000)]
    agent = CLEAN | {"/app/json": FOLDER, "/app/json/a.py": text("")} | dict.fromkeys(names, text(""))
    assert len(find_changes(agent, CLEAN, ["/app"]).refused) == 20_002


def test_links_are_not_followed_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = CLEAN | {f"/app/{number}": link("./" * 20 + "a.txt") for number in range(4)}
    assert len(find_changes(agent, CLEAN, ["/app"]).entries) == 4
    monkeypatch.setattr(carried_files, "MOST_LINK_STEPS", 2 * 21)
    assert len(find_changes(agent, CLEAN, ["/app"]).entries) == 2


@pytest.mark.parametrize(
    ("content", "is_carried"),
    [
        ("x = " + "[" * 9999, True),
        ("pytest = " + "[" * 9999, False),
        ("x = " + "1" * 9999, True),
        ("pytest = " + "1" * 9999, False),
        ("#" * 2**16 + "\n", False),
    ],
)
def test_settings_that_cannot_be_read_are_no_failure(content: str, is_carried: bool) -> None:
    agent = CLEAN | {"/app/sub/pyproject.toml": text(content)}
    assert ("/app/sub/pyproject.toml" in find_changes(agent, CLEAN, ["/app"]).entries) == is_carried


def test_files_that_tools_load_are_neither_changed_nor_removed() -> None:
    changed = find_changes({**CLEAN, "/app/conftest.py": text("forged")}, CLEAN, ["/app"])
    assert not changed.entries
    assert not changed.removed
    removed = find_changes(
        {path: entry for path, entry in CLEAN.items() if path != "/app/conftest.py"}, CLEAN, ["/app"]
    )
    assert not removed.removed


def test_settings_of_pytest_keep_their_values_and_the_file_may_change() -> None:
    path, settings = "/app/pyproject.toml", '[tool.pytest.ini_options]\naddopts = "{}"\n[project]\nname = "{}"\n'
    named = {**CLEAN, path: text(settings.format("-q", "y"))}
    assert set(find_changes(named, CLEAN, ["/app"]).entries) == {path}
    for content in (settings.format("--collect-only", "x"), "[tool.pytest", "[project]\n"):
        assert set(find_changes({**CLEAN, path: text(content)}, CLEAN, ["/app"]).refused) == {path}
    setup = {**CLEAN, "/app/setup.cfg": text("[tool:pytest]\naddopts = --collect-only\n")}
    assert set(find_changes(setup, CLEAN, ["/app"]).refused) == {"/app/setup.cfg"}


@pytest.mark.parametrize(
    ("links", "refused"),
    [
        ({"/app/x": "/tests/expected.txt"}, {"/app/x"}),
        ({"/app/x": "../tests"}, {"/app/x"}),
        ({"/app/x": "/app/a.txt"}, set()),
        ({"/app/package/r": "../package/..", "/app/x": "package/r/../tests"}, {"/app/x"}),
        ({"/app/x": "y", "/app/y": "x"}, {"/app/x", "/app/y"}),
        ({"/app/x": "package/../a.txt"}, set()),
    ],
)
def test_links_stay_below_what_is_carried(links: dict[str, str], refused: set[str]) -> None:
    agent = {**CLEAN, **{path: link(target) for path, target in links.items()}}
    assert set(find_changes(agent, CLEAN, ["/app"]).refused) == refused


def test_a_link_through_one_of_the_image_that_leads_out_is_refused() -> None:
    clean = {**CLEAN, "/app/data": LEADS_OUT}
    changes = find_changes({**clean, "/app/x": link("data/../tests")}, clean, ["/app"])
    assert set(changes.refused) == {"/app/x"}
    assert not changes.removed


def test_a_file_that_became_a_link_is_removed() -> None:
    changes = find_changes({**CLEAN, "/app/a.txt": LEADS_OUT}, CLEAN, ["/app"])
    assert changes.removed == ("/app/a.txt",)
    assert set(changes.refused) == {"/app/a.txt"}


def test_what_is_below_a_refused_link_is_refused() -> None:
    agent = {**CLEAN, "/app/old": LEADS_OUT, "/app/old/b.txt": text("b2")}
    changes = find_changes(agent, CLEAN, ["/app"])
    assert set(changes.refused) == {"/app/old", "/app/old/b.txt"}


def test_a_download_is_a_tree_and_excluded_files_are_none_of_it() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in (("app", tarfile.DIRTYPE), ("app/pipe", tarfile.FIFOTYPE), ("app/out", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, "/etc/passwd", 0o755
            archive.addfile(member)
        for name in ("app/run", "app/logs/1.log"):
            member = tarfile.TarInfo(name)
            member.size, member.mode = 1, 0o6755
            archive.addfile(member, io.BytesIO(b"x"))
    tree = read_tree(check([buffer.getvalue()], 1000), "/srv/app")
    assert tree == {
        "/srv/app": FOLDER,
        "/srv/app/pipe": LEADS_OUT,
        "/srv/app/out": LEADS_OUT,
        "/srv/app/run": Entry("file", 0o755, b"x"),
        "/srv/app/logs/1.log": Entry("file", 0o755, b"x"),
    }
    assert set(without(tree, "/srv/app", ["*.log", "pipe"])) == {"/srv/app", "/srv/app/out", "/srv/app/run"}
    assert "/srv/app/logs/1.log" not in without(tree, "/srv/app", ["logs"])
