"""E5 with FAISS: what the server answers is what numpy computes from the model's own hidden states."""

import json
import re
import string
import sys
from pathlib import Path

import faiss
import httpx
import numpy as np
import pytest
import torch
from agentrl_tools.search import SearchService
from agentrl_tools.search.corpora import open_corpora
from agentrl_tools.search.corpus import write_corpus
from agentrl_tools.search.e5 import E5
from agentrl_tools.search.encoder import Encoder
from agentrl_tools.search.vectors import FlatOnDevice, build_index
from tokenizers import BertWordPieceTokenizer
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from agentrl.core.errors import ConfigError, MissingError
from agentrl.toolserver.launch import launch_tool

NAMES = ["Sadova", "Remu", "Tamo Rilek", "Velburg", "Kosa Denar", "Norton", "Talsaga"]
ROWS = [
    {
        "id": f"d{i}",
        "contents": f'"{NAMES[i % 7]}"\n{NAMES[i % 7]} is near {NAMES[(3 * i + 1) % 7]}, {i} miles {"on " * i}',
    }
    for i in range(23)
]
QUERIES = ["Where is Sadova? " * 4, "Tamo Rilek on on on on on on on on on on", "17 miles from Norton"]


def make_model(folder: Path, width: int = 32, seed: int = 10) -> Path:
    """Write a random BERT whose WordPiece vocabulary is the documents' words, and all letters for others."""
    texts = " ".join([row["contents"] for row in ROWS] + ["query: passage:"]).lower()
    letters = sorted(set(string.ascii_lowercase + string.digits + string.punctuation))
    pieces = sorted(set(re.findall(r"[a-z]{2,}", texts))) + letters + [f"##{letter}" for letter in letters]
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = BertWordPieceTokenizer({piece: number for number, piece in enumerate(specials + pieces)})
    PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("e5"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(ROWS, tmp_path / "wiki.jsonl")
    return tmp_path / "wiki.jsonl"


def direct(model: Path, texts: list[str]) -> np.ndarray:
    """Encode one text at a time, without padding, and average by numpy."""
    tokenizer, bert = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    vectors = []
    for text in texts:
        with torch.no_grad():
            ids = torch.tensor([tokenizer(text, truncation=True, max_length=64)["input_ids"]])
            hidden = bert(input_ids=ids).last_hidden_state[0].numpy()
        mean = hidden.mean(0)
        vectors.append(mean / np.linalg.norm(mean))
    return np.stack(vectors)


def expected(model: Path, queries: list[str], topk: int) -> list[list[tuple[str, float]]]:
    scores = (
        direct(model, [f"query: {q}" for q in queries]) @ direct(model, [f"passage: {r['contents']}" for r in ROWS]).T
    )
    return [[(f"d{i}", float(row[i])) for i in np.argsort(-row)[:topk]] for row in scores]


def answers(result: list[list[dict]]) -> list[list[tuple[str, float]]]:
    return [[(hit["document"]["id"], hit["score"]) for hit in hits] for hits in result]


def assert_same(actual: list[list[tuple[str, float]]], expected_value: list[list[tuple[str, float]]]) -> None:
    assert [[name for name, _ in hits] for hits in actual] == [[name for name, _ in hits] for hits in expected_value]
    for hits, right in zip(actual, expected_value, strict=True):
        assert [score for _, score in hits] == pytest.approx([score for _, score in right], abs=1e-5)


@pytest.mark.usefixtures("forked_starts")
def test_a_real_server_builds_saves_loads_and_answers_as_numpy(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = tmp_path / "made" / "e5_Flat.index"
    options = {"corpus": str(corpus), "retriever": "e5", "model": str(model), "index": str(index), "topk": 4}
    arguments = SearchService().launch_arguments(options, None, tmp_path)  # type: ignore[arg-type]
    expected_value = expected(model, QUERIES, 4)
    assert len({name for hits in expected_value for name, _ in hits}) > 4, "the queries tell documents apart"
    log = tmp_path / "log"
    with launch_tool("search", arguments, log=log, timeout_s=120) as server, httpx.Client(trust_env=False) as http:
        many = http.post(f"{server.url}/retrieve", json={"queries": QUERIES, "return_scores": True}).json()
        single_reply = http.post(f"{server.url}/retrieve", json={"query": QUERIES[1], "topk": 2}).json()
    assert_same(answers(many["result"]), expected_value)
    assert [hit["id"] for hit in single_reply["result"][0]] == [name for name, _ in expected_value[1][:2]]
    assert many["result"][0][0]["document"] == next(row for row in ROWS if row["id"] == expected_value[0][0][0])
    assert "built the index, saved as" in log.read_text()
    assert [path.name for path in index.parent.iterdir()] == ["e5_Flat.index"]

    loaded = open_corpora({"default": corpus}, "e5", model=str(model), indexes={"default": index})
    assert_same(answers(loaded.search(QUERIES, 4)), expected_value)
    assert "loaded" in capsys.readouterr().out


def test_padding_changes_nothing_and_texts_are_cut(model: Path) -> None:
    texts = ["short", "a much longer text about Tamo Rilek and the town of Sadova " * 30]
    expected_value = direct(model, [f"query: {text}" for text in texts])
    np.testing.assert_allclose(Encoder(str(model)).encode(texts, "query"), expected_value, atol=1e-5)
    assert Encoder(str(model)).encode([], "query").shape == (0, 32)


@pytest.fixture
def searched(model: Path) -> tuple[Encoder, faiss.Index]:
    encoder = Encoder(str(model))
    return encoder, build_index(encoder, ROWS, print)


def test_vectors_searched_block_by_block_as_faiss_does(
    searched: tuple[Encoder, faiss.Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl_tools.search.vectors.BLOCK", 7)
    encoder, index = searched
    queries = encoder.encode(QUERIES, "query")
    for topk in (1, 5, len(ROWS)):
        wanted_scores, expected_value = index.search(queries, topk)
        scores, numbers = FlatOnDevice(index, torch.device("cpu"), torch.float32).search(queries, topk)
        np.testing.assert_array_equal(numbers, expected_value)
        np.testing.assert_allclose(scores, wanted_scores, atol=1e-6)
        halves, _ = FlatOnDevice(index, torch.device("cpu")).search(queries, topk)
        np.testing.assert_allclose(halves, wanted_scores, atol=2e-4)


def test_an_approximate_index_and_more_asked_than_there_is(searched: tuple[Encoder, faiss.Index], model: Path) -> None:
    encoder, flat = searched
    graph = faiss.IndexHNSWFlat(flat.d, 8, faiss.METRIC_INNER_PRODUCT)
    graph.add(flat.reconstruct_n(0, flat.ntotal))
    assert_same(answers(E5(ROWS, encoder, graph).search(QUERIES, 3)), expected(model, QUERIES, 3))
    assert [len(hits) for hits in E5(ROWS, encoder, flat).search(QUERIES, 100)] == [23, 23, 23]
    assert E5(ROWS, encoder, flat).search([], 3) == []


def test_an_index_that_does_not_fit_is_refused_with_numbers(model: Path, corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "e5_Flat.index"

    def opening(**options: object) -> None:
        files = {"default": corpus}
        open_corpora(files, "e5", **{"model": str(model), "indexes": {"default": path}, **options})  # type: ignore[arg-type]

    opening()
    other_model = make_model(tmp_path / "wide", width=48)
    with pytest.raises(ConfigError, match=r"holds vectors of 32 numbers, and .*wide makes vectors of 48"):
        opening(model=str(other_model))
    write_corpus(ROWS[:20], corpus)
    with pytest.raises(ConfigError, match="holds 23 passages, and the corpus has 20"):
        opening()
    euclidean = faiss.IndexFlatL2(32)
    euclidean.add(np.zeros((20, 32), np.float32))
    faiss.write_index(euclidean, str(path))
    with pytest.raises(ConfigError, match="does not rank by inner product"):
        opening()
    path.write_text("no index")
    with pytest.raises(ConfigError, match=r"e5_Flat\.index is not a FAISS index"):
        opening()
    with pytest.raises(ConfigError, match="there is no such corpus; --corpus gives default"):
        opening(indexes={"wiki": path})


def test_a_model_that_cannot_be_used(model: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model \(tools\.search\.options\.model\)=.*nowhere cannot be loaded"):
        open_corpora({"default": corpus}, "e5", model=str(tmp_path / "nowhere"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"--device cuda \(tools\.search\.options\.device\): torch sees no GPU"):
            open_corpora({"default": corpus}, "e5", model=str(model), device="cuda")
    config = json.loads((model / "config.json").read_text())
    broken = make_model(tmp_path / "broken")
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"weights are missing, such as 'encoder\.layer\.2"):
        Encoder(str(broken))


def test_without_faiss_the_extra_is_named(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    message = r"tools\.search\.options\.retriever=e5\) needs the package faiss: pip install 'agentrl-framework\[e5\]'"
    with pytest.raises(MissingError, match=message):
        SearchService().check({"retriever": "e5"})
    with pytest.raises(MissingError, match=message):
        open_corpora({"default": corpus}, "e5")
