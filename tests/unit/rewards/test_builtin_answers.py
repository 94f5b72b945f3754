"""Every built-in reward on gold, wrong, hostile and empty answers."""

import asyncio
import inspect
import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from agentrl.config.rewards import RewardConfig
from agentrl.core.errors import ConfigError, ToolFailure
from agentrl.core.registry import REWARDS, names
from agentrl.core.task import Task
from agentrl.core.types import Message, ToolResult, ToolStatus
from agentrl.rewards import Sample, builtin
from agentrl.rewards.choices import named_option
from agentrl.rewards.constraints import CHECKS, Constraint, read_constraints
from agentrl.rewards.grader import check_labels

CHOICES = ["10 eV", "20 eV", "30 eV", "40 eV"]
RULES = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words", "keywords:existence"],
    "kwargs": [{}, {"num_words": 4, "relation": "at least", "language": None}, {"keywords": ["river"]}],
}
TESTS = {"inputs": ["1 2\n", "-5 5\n"], "outputs": ["3\n", "0\n"]}
SUM = "```python\nprint(sum(map(int, input().split())))\n```"


async def run_tests(name: str, arguments: Mapping[str, Any]) -> ToolResult:
    """The tool ``judge`` with trusted programs, in processes of ours."""
    assert name == "judge"
    verdicts = []
    for stdin, expected in zip(arguments["inputs"], arguments["outputs"], strict=True):
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-Sc", arguments["program"], stdin=-1, stdout=-1, stderr=-3, env={}
        )
        output, _ = await program.communicate(stdin.encode())
        right = program.returncode == 0 and output.split() == expected.encode().split()
        verdicts.append("accepted" if right else "wrong_answer")
    return ToolResult("c", ToolStatus.OK, "", {"verdicts": verdicts})


def score(name: str, rollout, text: str, label: Any, metadata: Mapping[str, Any], tools=run_tests) -> float:
    episode = rollout(text, label=label)
    episode.metadata = dict(metadata)
    result = getattr(builtin, name)(Sample.from_rollout(episode, tools))
    if inspect.isawaitable(result):
        result = asyncio.run(result)
    return result["score"] if isinstance(result, Mapping) else result


# By reward: label, metadata, lowest reward, and answers that get the highest, and the lowest.
ANSWERS: dict[str, tuple[Any, Mapping[str, Any], float, list[str], list[str], list[str]]] = {
    "exact_match": ("Rome", {}, 0.0, ["Rome", "<think>Oslo</think>rome."], ["Oslo"],
                    ["Rome Oslo Paris", "<answer>Rome</answer><answer>Oslo</answer>", "Rome\0"]),
    "squad_exact_match": ("Rome", {}, 0.0, ["the Rome!"], ["Oslo"], ["Rome or Oslo", "Rome" * 9]),
    "f1": ("Rome", {}, 0.0, ["Rome"], ["Oslo"], ["<think>Rome", "Rome</think>", "-Rome-Oslo"]),
    "squad_f1": ("Rome", {}, 0.0, ["Rome"], ["Oslo"], ["<think>Rome", "Rome</think>"]),
    "numeric": ("#### 1,234", {}, 0.0, ["It is 1234.0", r"\boxed{1,234}"], ["1235", "none"],
                ["1234 or 1235", "1e9999999", "9" * 10_000, "1234/0", "1233.9999"]),
    "math": (r"\frac{1}{2}", {}, 0.0, [r"\boxed{0.5}", r"so \boxed{\frac{2}{4}}"], [r"\boxed{2}", "0.5"],
             [r"\boxed{0.5} \boxed{1}", r"\boxed{" * 50, r"\boxed{0.5, 1}", r"\boxed{x}"]),
    "deepscaler": ("7", {}, 0.0, [r"<think>so</think>\boxed{7}"], [r"<think>7</think>\boxed{8}", r"\boxed{7}"],
                   [r"<think>\boxed{7}", r"<think></think>7", r"\boxed{7}</think>"]),
    "dapo": ("34", {}, -1.0, ["So\nAnswer: 34", "Answer: $34$", r"answer: \boxed{34}", "Answer: 3\nAnswer: 34"],
             ["Answer: 35", "34", r"\boxed{34}"],
             ["Answer: 34\nAnswer: 35", "Answer: 34 or 35", "Answer: 34" + " " * 400, "Answer:", "Answer: " + "34 " * 80]),
    "gpqa": ("C", {"choices": CHOICES}, 0.0,
             ["C", "(C)", "The answer is (C).", "Answer: C", r"\boxed{C}", r"\boxed{\text{C}}", "so\n**Answer: C**", "30 eV",
              "A is wrong.\nC) 30 eV"],
             ["A", "The answer is B", r"\boxed{D}", "20 eV"],
             ["A B C D", "Answer: C or D", "Answer: A, B, C", r"\boxed{C, D}", "Answer: A\nAnswer: C\nAnswer: B", "c is a letter",
              "answer: E", "C" * 500, r"\boxed{C} \boxed{A}"]),
    "ifbench": (None, RULES, 0.0, ["The river is very long."], ["The river, is very long.", "A river."],
                ["river " * 3 + ",", "rivers are four words long", "<answer></answer>the river is very long"]),
    "code": (TESTS, {}, 0.0, [SUM, f"<think>```python\n0\n```</think>{SUM}"],
             ["```python\nprint(3)\n```", "print(3)", "```python\nprint(\n```"],
             ["```python\nimport os; print(3, flush=True); os._exit(1)\n```", "```python\nprint('\ud800')\n```",
              "```python\nraise SystemExit(0)\n```", "```python\nprint('accepted')\n```"]),
}  # fmt: skip
CASES = [
    pytest.param(name, text, expected, id=f"{name}-{kind}-{index}")
    for name, (_, _, lowest, gold, wrong, hostile) in ANSWERS.items()
    for kind, texts, expected in [
        ("gold", gold, 1.0),
        ("wrong", wrong, lowest),
        ("hostile", hostile, lowest),
        ("empty", ["", " \n", "<think></think>", "<answer></answer>"], lowest),
    ]
    for index, text in enumerate(texts)
]


def test_every_builtin_reward_has_answers():
    assert {*names(REWARDS)} == {*ANSWERS, "environment"}


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_answers(rollout, name, text, expected):
    label, metadata, *_ = ANSWERS[name]
    assert score(name, rollout, text, label, metadata) == expected


def test_shares_are_metrics(rollout):
    sample = Sample.from_rollout(rollout("A, river."))
    sample.metadata.update(RULES)
    assert builtin.ifbench(sample) == {"score": 0.0, "followed": 1 / 3}
    half = rollout("```python\nprint(3)\n```", label=TESTS)
    assert asyncio.run(builtin.code(Sample.from_rollout(half, run_tests))) == {"score": 0.0, "passed": 0.5}


@pytest.mark.parametrize(
    "result", [(ToolStatus.INVALID, None), (ToolStatus.OK, {"verdicts": ["accepted"]}), (ToolStatus.OK, [])]
)
def test_a_judge_without_verdicts_is_no_reward(rollout, result):
    async def tools(name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult("c", result[0], "odd", result[1])

    with pytest.raises(ToolFailure, match="returned no verdicts"):
        score("code", rollout, SUM, TESTS, {}, tools)


@pytest.mark.parametrize(
    ("name", "label", "metadata", "message"),
    [
        ("gpqa", "Z", {}, "'Z' is no letter, number or text"),
        ("gpqa", "50 eV", {"choices": CHOICES}, "of the 4 options in metadata.choices"),
        ("ifbench", None, {}, "neither metadata nor label has instruction_id_list"),
        ("ifbench", None, {"instruction_id_list": ["no:such"]}, "no constraint 'no:such'"),
        ("ifbench", None, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, ""),
        ("ifbench", None, {"instruction_id_list": ["count:numbers"], "kwargs": [{"M": 1}]}, "arguments do not fit"),
        ("ifbench", None, {"instruction_id_list": ["keywords:frequency"],
                           "kwargs": [{"keyword": "a", "frequency": 1, "relation": "exactly"}]}, "neither 'at least'"),
        ("code", "x", {}, "a text that is no JSON"),
        ("code", {"inputs": ["1"], "outputs": []}, {}, "1 hidden inputs and 0 outputs"),
        ("code", {**TESTS, "fn_name": "f"}, {}, "call the function 'f'"),
        ("dapo", {}, {}, "needs a text, a number"),
    ],
)  # fmt: skip
def test_tasks_that_do_not_fit_are_refused_before_the_run(name, label, metadata, message):
    task = Task("t", (Message("user", "?"),), answer=label, metadata=metadata)
    if not message:
        return check_labels(RewardConfig(function=name), [task])
    with pytest.raises(ConfigError, match=message):
        check_labels(RewardConfig(function=name), [task])
    return None


@pytest.mark.parametrize("label", ["C", "(c)", 2, "30 eV"])
def test_labels_of_multiple_choice(rollout, label):
    assert score("gpqa", rollout, "C", label, {"choices": CHOICES}) == 1.0
    assert score("gpqa", rollout, "D", label, {"choices": dict(zip("ABCD", CHOICES, strict=True))}) == 0.0


def test_the_article_is_no_option():
    assert named_option("The answer is a long story.\nB") == "B"
    assert named_option("Choice: J") == "J"
    assert named_option("Choice: K") is None


@pytest.mark.parametrize(
    "label", [json.dumps(TESTS), [{"input": "1 2\n", "output": "3\n"}, {"input": "-5 5\n", "output": "0\n"}]]
)
def test_labels_of_programs(rollout, label):
    assert score("code", rollout, SUM, label, {}) == 1.0


def test_constraints_in_a_label():
    for label in (RULES, [RULES], json.dumps([RULES])):
        assert [constraint.name for constraint in read_constraints({}, label)] == RULES["instruction_id_list"]


# By constraint: arguments, a text that follows it, and one that does not.
CONSTRAINTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["sun", "moon"]}, "Sun and moon.", "Sunny moon."),
    "keywords:frequency": ({"keyword": "a b", "frequency": 2, "relation": "less than"}, "A b", "a b, a b"),
    "keywords:forbidden_words": ({"forbidden_words": ["sun"]}, "Sunny.", "The sun."),
    "keywords:letter_frequency": ({"letter": "Q", "let_frequency": 2, "let_relation": "at least"}, "q Q", "q"),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "at least"}, "Dr. A left. He ran!", "Dr. A left."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, "it's well-known", "one two three"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}, "a\n\n**So** b", "So\n\na"),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] [b]", "[a] []"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "a\nP.S. b", "a P.S. b"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "My answer is yes. No."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* **b**", "*a* ** **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2}, "Section 1\na\nSection 2\nb", "Section 1"),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<Title>>\na", "<< >>"),
    "combination:two_responses": ({}, "a\n******\nb", "a\n******\na"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Why?"}, "Why? So.", "So. Why?"),
    "startend:end_checker": ({"end_phrase": "The end."}, "a. The end.", "The end. a"),
    "startend:quotation": ({}, '"a b"', '"a b'),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "at least"}, "AB CD", "AB Cd"),
    "change_case:english_capital": ({}, "ABC 1!", "ABc"),
    "change_case:english_lowercase": ({}, "abc 1!", "12"),
    "punctuation:no_comma": ({}, "a; b", "a, b"),
    "count:word_count_range": ({"min_words": 2, "max_words": 3}, "a b", "a b c d"),
    "count:unique_word_count": ({"N": 2}, "a b a", "a A"),
    "count:numbers": ({"N": 2}, "1 and 2.5", "1 and 2 and 3"),
    "count:punctuation": ({}, "a. b, c! d? e; f: g?!", "a. b, c! d? e; f:"),
    "count:keywords_multiple": ({"keyword1": "a", "keyword2": "b"}, "a b b", "a b"),
    "words:alphabet": ({}, "Yes zebras always", "a c"),
    "words:vowel": ({}, "a e i", "a e i o"),
    "words:consonants": ({}, "strong winds", "a storm"),
    "words:palindrome": (
        {}, "level radar civic refer madam kayak rotor solos stats tenet", "level " * 10),
    "words:prime_lengths": ({}, "we ran", "four"),
    "words:repeats": ({"small_n": 1}, "a b", "a A"),
    "words:last_first": ({}, "I see dogs. Dogs run.", "I see. Dogs run."),
    "words:paragraph_last_first": ({}, "so it is so\nb a b", "so it is"),
    "words:no_consecutive": ({}, "a b a", "a apple"),
    "words:keywords_specific_position": ({"keyword": "x", "n": 2, "m": 2}, "A b. C x.", "A x. C d."),
    "words:words_position": ({"keyword": "x"}, "a x b x c.", "x a b x c"),
    "sentence:keyword": ({"N": 2, "word": "x"}, "Go. The x.", "The x. Go."),
    "sentence:increment": ({"small_n": 1}, "Go. Go on.", "Go. Go on then."),
    "format:parentheses": ({}, "([{([a])}])", "((((a))))"),
    "format:newline": ({}, "a\nb", "a b\nc"),
    "format:emoji": ({}, "So it is. 😀 Yes! 🎉", "So it is. 😀 Yes!"),
    "format:line_indent": ({}, "a\n b\n  c", "a\n b\n c"),
    "format:list": ({"sep": "..."}, "... a\n... b", "- a\n- b"),
    "format:title_case": ({}, "The Art of War", "The art of War"),
    "format:no_whitespace": ({}, "abc", "a c"),
}  # fmt: skip


def test_every_constraint_has_an_example():
    assert {*CONSTRAINTS} == {*CHECKS}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints(name):
    arguments, follows, breaks = CONSTRAINTS[name]
    [constraint] = read_constraints({"instruction_id": name, "kwargs": [arguments]}, None)
    assert constraint == Constraint(name, arguments)
    assert constraint.is_followed(follows)
    assert not constraint.is_followed(breaks)
    assert not constraint.is_followed(" ")
