from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agentrl.inference.embedded.stop_strings import StopMatcher

PIECES = ["<end>", "a", "</", "sea", "rch", ">", ">x", "</search>", "y</search>z", "h>", "Ã", "©"]


def matcher() -> StopMatcher:
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(PIECES)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    # Two ids more than the tokenizer knows, as padded embeddings have.
    return StopMatcher(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"), len(PIECES) + 2)


def test_only_tokens_that_hold_an_end_of_the_stop_string_are_looked_at() -> None:
    able = matcher().may_complete(("</search>",))
    assert {PIECES[at] for at in able.nonzero()[0]} == {">", ">x", "</search>", "y</search>z", "h>"}


def test_a_stop_string_ends_inside_a_token() -> None:
    stops = matcher()
    assert stops.find([1, 2, 3, 4, 6], ("</answer>", "</search>")) == "</search>"
    assert stops.find([1, 8], ("</search>",)) == "</search>"
    assert stops.find([2, 3, 5], ("</search>",)) is None


def test_characters_that_are_spread_over_tokens() -> None:
    stops = matcher()
    assert stops.may_complete(("é",)).all()
    assert stops.find([1, 10, 11], ("é",)) == "é"
    assert stops.find([1, 10], ("é",)) is None


def test_the_text_is_cut_before_the_stop() -> None:
    assert matcher().text([1, 2, 3, 4, 6], "</search>", skip_special=True) == "a"
    assert matcher().text([1, 0], None, skip_special=True) == "a"
    assert matcher().text([1, 0], None, skip_special=False) == "a<end>"
