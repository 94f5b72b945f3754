"""Worker process of `agentrl.adapters.reasoning_gym`: makes entries of reasoning-gym's datasets, and scores answers.

For each line of JSON ``{"call", ...arguments}`` it prints one: ``{"value"}``, or ``{"error", "usage"}``, where ``usage`` is true
if the arguments are what reasoning-gym refuses. Its parent sets ``PYTHONHASHSEED``, on which some datasets depend.

Scorers of reasoning-gym evaluate answers as Python (`eval`, SymPy's ``parse_expr``). Here they read literals and mathematical
expressions only, so that no code of a policy runs.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import keyword
import os
import resource
import signal
import sys
import tokenize
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

READY = "ready"
_MEMORY = 4 << 30
"""Bytes of address space; beyond it Python raises MemoryError."""
_SCORERS_WITH_EVAL = (
    "algorithmic.string_insertion",
    "algorithmic.spiral_matrix",
    "algorithmic.binary_matrix",
    "games.n_queens",
)
_SCORERS_WITH_SYMPY = ("games.puzzle24", "games.countdown")
"""Modules that import ``parse_expr`` by its name; others call ``sympy.parse_expr``."""
_PLAIN_FUNCTIONS = frozenset(
    {"sqrt", "cbrt", "root", "real_root", "max", "min", "abs", "round", "pow", "divmod", "int", "float"}
)
"""Functions that expressions may call, besides the classes of SymPy."""


class UsageError(ValueError):
    """Arguments that reasoning-gym refuses."""


def main() -> None:
    """Serve calls until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to standard error
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        import_library()
    except ImportError as error:
        out.write(f"{error}\n")
        return
    out.write(f"{READY}\n")
    for line in sys.stdin:
        arguments = json.loads(line)
        call = CALLS[arguments.pop("call")]
        try:
            reply = {"value": call(**arguments)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "usage": isinstance(error, UsageError)}
        out.write(json.dumps(reply) + "\n")


def import_library() -> None:
    """Import reasoning-gym, and replace what evaluates answers as code."""
    import sympy

    parse = guard(sympy.parse_expr, vars(sympy))
    sympy.parse_expr = parse
    for name in _SCORERS_WITH_EVAL:
        importlib.import_module(f"reasoning_gym.{name}").eval = ast.literal_eval  # type: ignore[attr-defined]
    for name in _SCORERS_WITH_SYMPY:
        importlib.import_module(f"reasoning_gym.{name}").parse_expr = parse  # type: ignore[attr-defined]


def guard(parse_expr: Callable[..., object], namespace: Mapping[str, object]) -> Callable[..., object]:
    """Return SymPy's ``parse_expr`` for mathematical expressions only; it raises ValueError for others.

    Args:
        parse_expr: evaluates an expression as Python.
        namespace: of SymPy.
    """
    import sympy

    def parse(text: str, *arguments: object, **options: object) -> object:
        for token in tokenize.generate_tokens(io.StringIO(text.strip()).readline):
            name = token.string
            if token.type == tokenize.NAME:
                definition = namespace.get(name, getattr(builtins, name, None))
                is_expression = isinstance(definition, sympy.Basic) or (
                    isinstance(definition, type) and issubclass(definition, sympy.Basic)
                )
                is_safe = definition is None or is_expression or name in _PLAIN_FUNCTIONS
                if not is_safe or keyword.iskeyword(name) or "__" in name:
                    raise ValueError(f"{name} is no mathematical function")
            elif token.type == tokenize.STRING or name == ".":
                raise ValueError("texts and attributes are no mathematical expressions")
        return parse_expr(text, *arguments, **options)

    return parse


def plain(value: object) -> object:
    """Return an entry's value with NumPy's scalars and arrays as Python's, so that its ``repr`` is a literal."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {plain(key): plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(plain, value))
    return str(value) if isinstance(value, str) else value


def list_datasets() -> list[str]:
    """Return the names of all datasets but composites."""
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


def list_prompts() -> dict[str, str]:
    """Return reasoning-gym's system prompts by name."""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return dict(SYSTEM_PROMPTS)


def count_levels(dataset: str) -> int:
    """Return the number of levels of a dataset's curriculum, up to the first that the dataset refuses; 0: it has none."""
    from reasoning_gym.factory import create_curriculum, has_curriculum

    _check_name(dataset)
    if not has_curriculum(dataset):
        return 0
    curriculum = create_curriculum(dataset)
    most = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=0)
    for level in range(most):
        curriculum.set_global_level(level)
        try:
            _validate(curriculum.generate_configuration())
        except AssertionError:
            return level
    return most


def check_entries(spec: str) -> None:
    """Check that a composite can be made; see `make_entry`."""
    _composite(spec)


def make_entry(spec: str, index: int) -> dict[str, str | None]:
    """Return an entry of a composite dataset.

    Args:
        spec: JSON with ``size``, ``seed`` and ``datasets``: ``name``, ``weight``, ``config`` and ``level`` each.
        index: of the entry.
    """
    entry = plain(_composite(spec)[index])
    assert isinstance(entry, dict), "entries are dictionaries"
    answer = entry["answer"]
    return {
        "question": entry["question"],
        "answer": answer if answer is None else str(answer),
        "dataset": entry["metadata"]["source_dataset"],
        "entry": repr(entry),
    }


def score_answer(
    dataset: str, config: Mapping[str, object], level: int | None, entry: str, answer: str | None, cpu_s: float
) -> tuple[float, bool]:
    """Return the score that a dataset gives to an answer, and whether its scorer can read the answer.

    A scorer may raise for a text that has not the form of an answer. If it does not raise for the entry's own answer, the score
    is 0; otherwise the scorer is at fault.

    Args:
        dataset: its name.
        config: its options.
        level: of its curriculum.
        entry: the literal of `make_entry`.
        answer: None: the policy gave none.
        cpu_s: CPU seconds that it may take. Beyond it the kernel ends the process, in any state and even if the parent is gone.
    """
    scorer, own_entry = _scorer(dataset, json.dumps(config), level), ast.literal_eval(entry)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return float(scorer.score_answer(answer, own_entry)), True
    except Exception:
        scorer.score_answer(own_entry["answer"], own_entry)
        return 0.0, False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@cache
def _composite(spec: str) -> ProceduralDataset:
    from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec

    options = json.loads(spec)
    specs = []
    for source in options["datasets"]:
        config = dataset_config(source["name"], source["config"], source["level"], options["size"])
        specs.append(DatasetSpec(source["name"], source["weight"], config))
    composite = CompositeConfig(size=options["size"], seed=options["seed"], datasets=specs)
    try:
        composite.validate()
        return CompositeDataset(composite)
    except (AssertionError, ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


@cache
def _scorer(dataset: str, config: str, level: int | None) -> ProceduralDataset:
    from reasoning_gym.factory import create_dataset

    return create_dataset(dataset, **{**dataset_config(dataset, json.loads(config), level, 1), "seed": 0, "size": 1})


def dataset_config(dataset: str, config: Mapping[str, object], level: int | None, size: int) -> dict[str, object]:
    """Return the options of a dataset: those of ``config``, and of a level of its curriculum.

    Raises:
        UsageError: there is no such dataset, option or level, or the dataset refuses a value.
    """
    from reasoning_gym.factory import DATASETS, create_curriculum

    _check_name(dataset)
    _, config_class = DATASETS[dataset]
    if level is not None and not 0 <= level < (levels := count_levels(dataset)):
        raise UsageError(f"{dataset} has {levels} levels, from 0, and not level {level}")
    try:
        if level is None:
            options = config_class(**{"size": size, **config})
        else:
            curriculum = create_curriculum(dataset)
            curriculum.set_global_level(level)
            options = curriculum.generate_configuration({"size": size, **config})
        _validate(options)
    except (AssertionError, ValueError, TypeError) as error:
        raise UsageError(f"{dataset}{'' if level is None else f' at level {level}'}: {error}") from error
    fields = dict(vars(options))
    if "seed" not in config:
        del fields["seed"]  # the composite derives one
    return fields


def _validate(options: object) -> None:
    if hasattr(options, "validate"):
        options.validate()


def _check_name(dataset: str) -> None:
    if dataset not in list_datasets():
        raise UsageError(f"there is no dataset {dataset!r}")


CALLS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (list_datasets, list_prompts, count_levels, check_entries, make_entry, score_answer)
}
"""What the worker can be asked for."""

if __name__ == "__main__":
    main()
