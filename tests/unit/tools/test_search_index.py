"""Ranking, ties, corpora on disk, and the search in the process."""

import asyncio
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from agentrl_tools.search import SearchService
from agentrl_tools.search.bm25 import BM25, bm25_corpora
from agentrl_tools.search.corpus import named_files, open_corpus, read_corpus, write_corpus
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Task, TaskSet, ToolCall, ToolResult, ToolStatus
from agentrl.core.errors import ConfigError, MissingError, UnknownNameError
from tests.unit.core.test_atomic_files import full_disk_after


def rows(*contents: str) -> list[dict[str, str]]:
    return [{"id": str(index), "contents": text} for index, text in enumerate(contents)]


PLACES = rows('"Sadova"\nSadova is a town.', '"Remu"\nRemu is a land near Sadova.', '"Tamo Rilek"\nBorn in Remu.')


def ids(hits: list[dict[str, object]]) -> list[str]:
    return [hit["document"]["id"] for hit in hits]  # type: ignore[index]


def test_the_best_comes_first_and_strangers_not_at_all() -> None:
    sadova, tamo, nobody, empty = BM25(PLACES).search(["SADOVA", "tamo, rilek!", "Xyzzy", " ?"], topk=3)
    assert ids(sadova) == ["0", "1"]
    assert sadova[0]["score"] > sadova[1]["score"] > 0
    assert ids(tamo) == ["2"]
    assert nobody == empty == []


def test_an_index_is_built_without_a_word_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    BM25(PLACES)
    assert not caplog.records, "bm25s logs at the level DEBUG by itself"


def test_ties_go_to_the_first_in_the_corpus() -> None:
    index = BM25(rows(*(f"same words {'x' if i == 7 else 'y'}" for i in range(20))))
    (hits,) = index.search(["same x"], topk=4)
    assert ids(hits) == ["7", "0", "1", "2"]


@given(st.lists(st.text("abc ", min_size=1), min_size=1, max_size=8), st.text("abc "), st.integers(1, 10))
def test_a_smaller_topk_is_a_prefix(contents: list[str], query: str, topk: int) -> None:
    index = BM25([*rows(*contents), {"id": "last", "contents": "a b c"}])
    (top_results,), (everything,) = index.search([query], topk), index.search([query], 100)
    assert top_results == everything[:topk]
    scores = [hit["score"] for hit in everything]
    assert scores == sorted(scores, reverse=True)
    assert bool(everything) == any(word in text.split() for word in query.split() for text in [*contents, "a b c"])


@given(st.text())
def test_any_text_can_be_asked(query: str) -> None:
    (hits,) = BM25(PLACES).search([query], topk=2)
    assert len(hits) <= 2


def test_corpora_by_name() -> None:
    corpora = bm25_corpora({"train": PLACES, "eval": rows("another Sadova")})
    assert len(corpora.search(["sadova"], 3, "train")[0]) == 2
    assert len(corpora.search(["sadova"], 3, "eval")[0]) == 1
    with pytest.raises(UnknownNameError, match="Did you mean 'train'"):
        corpora.search(["sadova"], 3, "trian")
    with pytest.raises(UnknownNameError, match="several: eval, train"):
        corpora.search(["sadova"], 3)
    assert bm25_corpora({"only": PLACES}).search(["tamo"], 3) == BM25(PLACES).search(["tamo"], 3)


@pytest.mark.parametrize("documents", [[], rows("?!")])
def test_a_corpus_without_words_is_refused(documents: list[dict[str, str]]) -> None:
    with pytest.raises(ConfigError, match="--corpus train: the corpus holds no document"):
        bm25_corpora({"train": documents})


def test_a_corpus_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "corpus.jsonl"
    write_corpus(PLACES, path)
    assert list(read_corpus(path, "--corpus")) == PLACES
    path.write_text('{"id": 7, "contents": "x", "more": 1}\n\n')
    assert list(read_corpus(path, "--corpus")) == [{"id": "7", "contents": "x"}]


def test_a_full_disk_leaves_no_half_corpus(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    with full_disk_after(10), pytest.raises(OSError, match="too large") as error:
        write_corpus(PLACES, path)
    assert error.value.filename == str(path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: expected an object .* found list"),
        ('{"id": "1", "text": "x"}', "line 2 has no 'contents'; it has: 'id', 'text'"),
        ('{"contents": "x"}', "line 2 has no 'id'"),
        ('{"id": "1", "contents": null}', "line 2: 'contents' must be a string, it is None"),
    ],
)
def test_a_bad_line_is_told_with_file_and_line(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "0", "contents": "x"}\n' + line)
    with pytest.raises(ConfigError, match=rf"--corpus: .*corpus\.jsonl, {fault}"):
        list(read_corpus(path, "--corpus"))


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_a_corpus_on_disk_is_a_sequence_of_checked_documents(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lines = [json.dumps({"id": index, "contents": f"Zürich {index}"}, ensure_ascii=False) for index in range(9)]
    text = ("\n\n".join(lines)).encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    documents = open_corpus(path, "--corpus")
    assert [row["contents"] for row in documents] == [f"Zürich {index}" for index in range(9)]
    assert len(documents) == 9
    assert documents[-1] == {"id": "8", "contents": "Zürich 8"}
    assert documents[3:5] == [documents[3], documents[4]]
    (hits,) = BM25(documents).search(["7"], topk=2)
    assert ids(hits) == ["7"]
    bad = text + b'\n{"id": 9}'
    path.write_bytes(gzip.compress(bad) if name.endswith("gz") else bad)
    with pytest.raises(ConfigError, match=r"corpus\.jsonl.*, line 18 has no 'contents'; it has: 'id'"):
        open_corpus(path, "--corpus")


def test_an_empty_or_broken_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"--corpus: .*a\.jsonl holds no document"):
        open_corpus(tmp_path / "a.jsonl", "--corpus")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"id": 1, "contents": "x"}\n')[:-9])
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz cannot be unpacked"):
        open_corpus(tmp_path / "b.jsonl.gz", "--corpus")


def test_a_corpus_file_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"--corpus: there is no file nowhere\.jsonl"):
        list(read_corpus(Path("nowhere.jsonl"), "--corpus"))


def test_corpus_options() -> None:
    assert named_files(["a.jsonl"], "--corpus") == {"default": Path("a.jsonl")}
    assert named_files(["train=/x/a=b.jsonl", "/x/a=b.jsonl"], "--corpus") == {
        "train": Path("/x/a=b.jsonl"),
        "default": Path("/x/a=b.jsonl"),
    }
    with pytest.raises(ConfigError, match=r"--index: each needs a unique name .* default, default"):
        named_files(["a.index", "b.index"], "--index")


def search(arguments: dict[str, object], options: dict[str, object] | None = None) -> ToolResult:
    client = SearchService().local_client({"train": PLACES}, options or {})
    return asyncio.run(client.call(ToolCall("c", "search", arguments), episode_id="e"))


def test_local_search_answers_as_the_server_does() -> None:
    actual = search({"query": "sadova"}, {"topk": 1})
    assert (actual.call_id, actual.status, actual.content) == ("c", ToolStatus.OK, '"Sadova"\nSadova is a town.')
    assert ids(actual.data) == ["0"]
    assert len(search({"query": "sadova", "topk": 2}, {"topk": 1}).data) == 2
    nothing = search({"query": "xyzzy"}, {"topk": 1})
    assert (nothing.status, nothing.content, nothing.data) == (ToolStatus.OK, "No document matches the query.", [])


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "'query' is a required property"),
        ({"query": 1}, "is not of type 'string'"),
        ({"query": "x", "topk": 0}, "less than the minimum"),
        ({"query": "x", "corpus": "other"}, "unknown corpus 'other'"),
        ({"query": "x", "k": 1}, "'k' was unexpected"),
    ],
)
def test_a_bad_call_is_a_result(arguments: dict[str, object], fault: str) -> None:
    result = search(arguments)
    assert (result.call_id, result.status) == ("c", ToolStatus.INVALID)
    assert fault in result.content


class Tasks(TaskSet):
    def __init__(self, *names: str) -> None:
        self.names = names

    def split(self, name: str) -> list[Task]:
        return []

    def corpora(self) -> dict[str, list[dict[str, str]]]:
        return dict.fromkeys(self.names, PLACES)


def test_launch_arguments(tmp_path: Path) -> None:
    service = SearchService()

    def search_options(options: dict[str, object], tasks: Tasks) -> dict[str, object]:
        (argument,) = service.launch_arguments(options, tasks, tmp_path)
        config = yaml.safe_load(Path(argument.removeprefix("--config=")).read_text())
        return config["tools"]["search"]  # type: ignore[no-any-return]

    made = search_options({"topk": 2, "server": {"token": "secret"}}, Tasks("train", "eval"))
    assert made["corpus"] == {name: f"{tmp_path / name}.jsonl" for name in ("train", "eval")}
    assert (made["topk"], made["index"]) == (2, None)
    assert list(read_corpus(tmp_path / "eval.jsonl", "")) == PLACES
    given_file = search_options({"corpus": str(tmp_path / "train.jsonl")}, Tasks())
    assert given_file["corpus"] == {"default": str(tmp_path / "train.jsonl")}
    named = search_options({"corpus": {"x": str(tmp_path / "train.jsonl")}}, Tasks("train"))
    assert named["corpus"] == {"x": str(tmp_path / "train.jsonl")}


def test_launch_options_at_fault_name_their_key(tmp_path: Path) -> None:
    service = SearchService()
    with pytest.raises(ConfigError, match=r"tools\.search\.options\.corpus is not set, and Tasks has no corpora"):
        service.launch_arguments({}, Tasks(), tmp_path)
    with pytest.raises(MissingError, match=r"tools\.search\.options\.corpus: there is no file"):
        service.launch_arguments({"corpus": "nowhere.jsonl"}, Tasks(), tmp_path)
    with pytest.raises(ConfigError, match=r"tools\.search\.options\.topk=0: .*"):
        service.launch_arguments({"topk": 0}, Tasks("train"), tmp_path)
    with pytest.raises(ConfigError, match=r"unknown key 'tools\.search\.options\.top_k'\. Did you mean '[\w.]*topk'"):
        service.launch_arguments({"top_k": 5}, Tasks("train"), tmp_path)


@pytest.mark.parametrize(("platform_before", "seen"), [(None, "cpu"), ("cuda", "cuda")])
def test_jax_that_bm25s_starts_is_kept_off_the_gpu(tmp_path: Path, platform_before: str | None, seen: str) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("import os; print('jax', os.environ.get('JAX_PLATFORMS'))")
    (tmp_path / "jax" / "lax.py").write_text("def top_k(*rows):\n    pass")
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    environment |= {"PYTHONPATH": str(tmp_path)} | ({"JAX_PLATFORMS": platform_before} if platform_before else {})
    code = "import agentrl_tools.search; print('client'); import agentrl_tools.search.bm25"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["client", f"jax {seen}"], "a run's own process does not import it at all"


def test_options_that_do_not_fit() -> None:
    check = SearchService().check
    check({})
    with pytest.raises(MissingError, match=r"tools\.search\.options\.corpus: there is no file nowhere\.jsonl"):
        check({"corpus": "nowhere.jsonl"})
    with pytest.raises(ConfigError, match=r"tools\.search\.options\.retriever='bm24'"):
        check({"retriever": "bm24"})
    with pytest.raises(ConfigError, match=r"tools\.search\.options\.index=x\) is for --retriever e5"):
        check({"index": "x"})
    with pytest.raises(ConfigError, match="without a server there is only bm25"):
        SearchService().local_client({"train": PLACES}, {"retriever": "e5"})
