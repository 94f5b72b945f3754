"""Verifiable constraints on a text, by the names and arguments of IFEval (arXiv:2311.07911) and IFBench (arXiv:2507.02833).

The checks are strict, as IFEval's: they look at the whole answer. Words are runs of letters, digits, hyphens and apostrophes.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Check = Callable[..., bool]
"""Gets the text, and the arguments of the constraint by name."""
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]{0,3}\s+(?=[\"'“‘(\[]{0,3}[A-Z0-9])|\n{2,}")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e)|\b[A-Z])\.$")
_BULLET = re.compile(r"^\s*(?:\*(?!\*)|-(?!-)|•)\s+\S", re.MULTILINE)
_EMOJI = re.compile("[\u2600-\u27bf\U0001f300-\U0001faff]")
_VOWELS = "aeiou"
_MINOR_WORDS = frozenset(
    ["a", "an", "the", "and", "but", "or", "nor", "for", "of", "in", "on", "at", "to", "by", "with", "from", "as", "is"]
)
"""Words that titles write in lower case, except as the first word."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint of a task. Example: ``Constraint("punctuation:no_comma", {})``."""

    name: str
    """Its ``instruction_id``."""
    arguments: Mapping[str, object]
    """By name, without those that are null."""

    def is_followed(self, text: str) -> bool:
        """Return whether a text follows it. An empty text follows none."""
        return bool(text.strip()) and CHECKS[self.name](text, **self.arguments)


def read_constraints(metadata: Mapping[str, object], label: object) -> list[Constraint]:
    """Return the constraints of a task.

    Args:
        metadata: may have ``instruction_id_list`` (or ``instruction_id``) and ``kwargs``, one mapping for each.
        label: has them otherwise: such a mapping, a list of one, or one of both as JSON text.

    Raises:
        ValueError: there are none, one is not known, or its arguments do not fit.
    """
    source: object = metadata if {"instruction_id_list", "instruction_id"} & {*metadata} else label
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError):
            source = None
    if isinstance(source, list) and len(source) == 1:
        source = source[0]
    if not isinstance(source, Mapping):
        raise ValueError("neither metadata nor label has instruction_id_list and kwargs")
    names = source.get("instruction_id_list") or source.get("instruction_id")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"instruction_id_list is {names!r:.100}, and no list of names")
    arguments = source.get("kwargs") or [None] * len(names)
    if not isinstance(arguments, Sequence) or len(arguments) != len(names):
        raise ValueError(f"there are {len(names)} instructions, and kwargs is {arguments!r:.100}")
    constraints = []
    for name, named_arguments in zip(names, arguments, strict=True):
        if name not in CHECKS:
            raise ValueError(f"there is no constraint {name!r}; there are {', '.join(sorted(CHECKS))}")
        constraint = Constraint(
            name, {key: value for key, value in (named_arguments or {}).items() if value is not None}
        )
        try:
            constraint.is_followed("a text")
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{name}: its arguments do not fit: {error}") from None
        constraints.append(constraint)
    return constraints


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """Return the sentences of a text: they end with ``.``, ``!`` or ``?`` before a capital or a digit, or with a paragraph."""
    parts: list[str] = []
    for piece in _SENTENCE_END.split(text):
        if parts and _ABBREVIATION.search(parts[-1]):
            parts[-1] += f" {piece}"
        elif words(piece):
            parts.append(piece)
    return parts


def _compare(count: int, limit: int, relation: str = "at least") -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation={relation!r} is neither 'at least' nor 'less than'")
    return count >= limit if relation == "at least" else count < limit


def _count_phrase(text: str, phrase: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(phrase.lower())}(?!\w)", text.lower()))


def _paragraphs(text: str, separator: str) -> list[str]:
    return [piece for piece in re.split(separator, text) if piece.strip()]


def _keywords(text: str, *, keywords: Sequence[str]) -> bool:
    return all(_count_phrase(text, keyword) for keyword in keywords)


def _keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return _compare(_count_phrase(text, keyword), frequency, relation)


def _forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(_count_phrase(text, word) for word in forbidden_words)


def _letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return _compare(text.lower().count(letter.lower()), let_frequency, let_relation)


def _number_of_sentences(text: str, *, num_sentences: int, relation: str = "at least") -> bool:
    return _compare(len(sentences(text)), num_sentences, relation)


def _number_of_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text.strip())
    return all(piece.strip() for piece in parts) and len(parts) == num_paragraphs


def _number_of_words(text: str, *, num_words: int, relation: str = "at least") -> bool:
    return _compare(len(words(text)), num_words, relation)


def _nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = _paragraphs(text, r"\n\n")
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = words(parts[nth_paragraph - 1])[:1]
    return bool(first) and first[0].lower() == first_word.lower()


def _placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


def _postscript(text: str, *, postscript_marker: str) -> bool:
    marker = r"\s*".join(map(re.escape, postscript_marker.lower().replace(" ", "")))
    return re.search(rf"(?m)^\s*{marker}.*\S", text.lower()) is not None


def _bullet_lists(text: str, *, num_bullets: int) -> bool:
    return len(_BULLET.findall(text)) == num_bullets


def _constrained_response(text: str) -> bool:
    return text.strip() in ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _highlights(text: str, *, num_highlights: int) -> bool:
    spans = re.findall(r"\*\*[^\n*]+\*\*|(?<!\*)\*[^\n*]+\*(?!\*)", text)
    return sum(bool(span.strip("* ")) for span in spans) >= num_highlights


def _sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"(?m)^\W*{re.escape(section_spliter)}\s?[0-9]+", text)) >= num_sections


def _json(text: str) -> bool:
    fenced = re.fullmatch(r"\s*```(?:json)?\n(.*)\n?```\s*", text, re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text))


def _two_responses(text: str) -> bool:
    responses = [piece.strip() for piece in text.split("******")]
    return len(responses) == 2 and all(responses) and responses[0] != responses[1]


def _repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_words(text: str, *, capital_frequency: int, capital_relation: str = "at least") -> bool:
    capitals = [word for word in words(text) if word.isupper()]
    return _compare(len(capitals), capital_frequency, capital_relation)


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 2 and text[0] == text[-1] == '"'


def _letters(text: str) -> str:
    return "".join(filter(str.isalpha, text))


def _word_range(text: str, *, min_words: int, max_words: int) -> bool:
    return min_words <= len(words(text)) <= max_words


def _unique_words(text: str, *, N: int) -> bool:
    return len({word.lower() for word in words(text)}) >= N


def _count_numbers(text: str, *, N: int) -> bool:
    return len(re.findall(r"(?<!\w)[0-9]+(?:[.,][0-9]+)*(?!\w)", text)) == N


def _alphabet(text: str) -> bool:
    firsts = [word[0].lower() for word in words(text) if word[0].lower() in string.ascii_lowercase]
    return bool(firsts) and all(
        string.ascii_lowercase[(string.ascii_lowercase.index(first) + 1) % 26] == second
        for first, second in pairwise(firsts)
    )


def _palindromes(text: str) -> bool:
    return len({word.lower() for word in words(text) if len(word) >= 5 and word.lower() == word.lower()[::-1]}) >= 10


def _prime_lengths(text: str) -> bool:
    return bool(words(text)) and all(_is_prime(len(_letters(word))) for word in words(text))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _all_punctuation(text: str) -> bool:
    interrobang = next((mark for mark in ("?!", "!?", "\u203d") if mark in text), None)
    return interrobang is not None and all(mark in text.replace(interrobang, "", 1) for mark in ".,!?;:")


def _nested_parentheses(text: str, *, depth: int = 5) -> bool:
    deepest, stack = 0, list[str]()
    closings = {")": "(", "]": "[", "}": "{"}
    for character in text:
        if character in closings.values():
            stack.append(character)
            deepest = max(deepest, len(stack))
        elif character in closings and (not stack or stack.pop() != closings[character]):
            return False
    return not stack and deepest >= depth


def _one_word_a_line(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return all(len(line.split()) == 1 for line in lines)


def _sentence_emoji(text: str) -> bool:
    parts = re.split(r"(?<=[.!?])", text)
    ends = [piece for piece in parts if piece.strip()]
    # An emoji stands behind the mark that ends the sentence, so it begins the next piece.
    return len(ends) > 1 and all(_EMOJI.match(piece.strip()) for piece in ends[1:]) and not words(ends[-1])


def _repeats(text: str, *, small_n: int) -> bool:
    counts = Counter(word.lower() for word in words(text))
    return max(counts.values(), default=0) <= small_n


def _sentence_keyword(text: str, *, N: int, word: str) -> bool:
    parts = sentences(text)
    return len(parts) >= N and bool(_count_phrase(parts[N - 1], word))


def _last_first(text: str) -> bool:
    sentence_words = [part_words for piece in sentences(text) if (part_words := words(piece))]
    pairs = pairwise(sentence_words)
    return all(first[-1].lower() == second[0].lower() for first, second in pairs)


def _paragraph_last_first(text: str) -> bool:
    parts = [words(piece) for piece in _paragraphs(text, r"\n")]
    return all(piece and piece[0].lower() == piece[-1].lower() for piece in parts)


def _increment(text: str, *, small_n: int) -> bool:
    sizes = [len(words(piece)) for piece in sentences(text)]
    return all(second == first + small_n for first, second in pairwise(sizes))


def _no_consecutive(text: str) -> bool:
    firsts = [word[0].lower() for word in words(text)]
    return all(first != second for first, second in pairwise(firsts))


def _line_indent(text: str) -> bool:
    indents = [len(line) - len(line.lstrip(" ")) for line in text.splitlines() if line.strip()]
    return all(second > first for first, second in pairwise(indents))


def _list_marks(text: str, *, sep: str) -> bool:
    return sum(line.lstrip().startswith(sep) for line in text.splitlines()) >= 2


def _title_case(text: str) -> bool:
    titled = [word for word in words(text) if word[0].isalpha()]
    return all(word[0].isupper() or (index and word in _MINOR_WORDS) for index, word in enumerate(titled))


def _no_whitespace(text: str) -> bool:
    return not re.search(r"\s", text.strip())


def _count_keywords(text: str, **keywords: str) -> bool:
    names = [f"keyword{number}" for number in range(1, len(keywords) + 1)]
    times = (1, 2, 3, 5, 7)
    if not names or sorted(keywords) != names or len(names) > len(times):
        raise TypeError(f"it takes keyword1 to keyword{len(times)}, and got {', '.join(keywords) or 'none'}")
    return all(_count_phrase(text, keywords[name]) == count for name, count in zip(names, times, strict=False))


def _keyword_position(text: str, *, keyword: str, n: int, m: int) -> bool:
    parts = sentences(text)
    spot = words(parts[n - 1])[m - 1 : m] if len(parts) >= n else []
    return bool(spot) and spot[0].lower() == keyword.lower()


def _word_position(text: str, *, keyword: str) -> bool:
    places = words(text)
    return len(places) > 1 and places[1].lower() == places[-2].lower() == keyword.lower()


def _vowels(text: str) -> bool:
    return len({letter for letter in text.lower() if letter in _VOWELS}) <= 3


def _consonants(text: str) -> bool:
    clusters = [re.search(r"[bcdfghjklmnpqrstvwxyz]{2}", word.lower()) for word in words(text)]
    return bool(clusters) and all(clusters)


CHECKS: dict[str, Check] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_sentences": _number_of_sentences,
    "length_constraints:number_paragraphs": _number_of_paragraphs,
    "length_constraints:number_words": _number_of_words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullet_lists,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text: _letters(text).isupper(),
    "change_case:english_lowercase": lambda text: _letters(text).islower(),
    "punctuation:no_comma": lambda text: "," not in text,
    "count:word_count_range": _word_range,
    "count:unique_word_count": _unique_words,
    "count:numbers": _count_numbers,
    "count:punctuation": _all_punctuation,
    "count:keywords_multiple": _count_keywords,
    "words:alphabet": _alphabet,
    "words:vowel": _vowels,
    "words:consonants": _consonants,
    "words:palindrome": _palindromes,
    "words:prime_lengths": _prime_lengths,
    "words:repeats": _repeats,
    "words:last_first": _last_first,
    "words:paragraph_last_first": _paragraph_last_first,
    "words:no_consecutive": _no_consecutive,
    "words:keywords_specific_position": _keyword_position,
    "words:words_position": _word_position,
    "sentence:keyword": _sentence_keyword,
    "sentence:increment": _increment,
    "format:parentheses": _nested_parentheses,
    "format:newline": _one_word_a_line,
    "format:emoji": _sentence_emoji,
    "format:line_indent": _line_indent,
    "format:list": _list_marks,
    "format:title_case": _title_case,
    "format:no_whitespace": _no_whitespace,
}
"""By ``instruction_id``. Constraints that need a model of the language or further data, such as ``language:response_language``,
are not among them."""
