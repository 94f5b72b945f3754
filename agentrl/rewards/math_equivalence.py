"""Equivalence of two mathematical expressions, by math-verify in worker processes.

Parsing and simplifying an expression of a policy may take unlimited time or memory (``9^{9^{9}}``), in calls that neither
a signal nor a thread can interrupt. So it runs in worker processes that can be killed: a small pool for the whole
program, each process started when first needed. A worker ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
import unicodedata

from agentrl.rewards.answers import choice_letter, normalize
from agentrl.rewards.math_worker import READABLE, READY, SAME, UNREADABLE

_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|operatorname)\s{0,3}\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,!;: ]|[~$]|\\left|\\right")
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,.'’-]+[^\W_]+)*\.?")
"""Words, and numbers after the first one."""
_FUNCTIONS = re.compile(r"(?i)(sin|cos|tan|cot|sec|csc)h?|log|exp|sqrt|max|min|gcd|lcm|det|inf(ini)?ty|infinity|inf|pi")
_PERCENT = re.compile(r"(.*?)\s{0,3}\\?%", re.DOTALL)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUPERSCRIPT = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_VULGAR = re.compile(r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒]")
_BASE = re.compile(r"(?<=\w)_\{?([0-9]+)\}?$")
_UNIT = re.compile(r"(?<=[0-9}.)])\s{0,3}([a-z]+)\.?(?:\^\{?([0-9])\}?)?$", re.IGNORECASE)
_SPELLINGS = """
mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; in inch; inches; ft foot; feet;
yd yard; mi mile; mg milligram; g gram; kg kilogram; lb pound; oz ounce; ml milliliter millilitre; l liter litre;
ms millisecond; s second sec; min minute; h hour hr; day; week; month; year; mph; kmh kph
"""
_ALIASES = {"inches": "in", "feet": "ft"}
_UNITS = {
    spelling: _ALIASES.get(words[0], words[0])
    for words in map(str.split, _SPELLINGS.split(";"))
    for word in words
    for spelling in (word, f"{word}s")
}
_BRACKETS = {"(": "interval", "[": "interval", "\\{": "set"}


def rewrite(text: str) -> str:
    r"""Return an expression in the notation that math-verify reads: ``4\%`` as ``\frac{4}{100}``, ``x²`` as ``x^{2}``."""
    text = unicodedata.normalize("NFC", text).strip()
    text = choice_letter(text) or text.removesuffix(".").rstrip() or text
    text = _SUPERSCRIPT.sub(lambda power: f"^{{{power[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _VULGAR.sub(lambda match: rf"\frac{{{_vulgar(match[0])}}}", text)
    percent = _PERCENT.fullmatch(text.removeprefix("$").removesuffix("$"))
    return rf"\frac{{{percent[1]}}}{{100}}" if percent else text


def _vulgar(fraction: str) -> str:
    return unicodedata.normalize("NFKC", fraction).replace("\N{FRACTION SLASH}", "}{")


def compare_words(answer: str, label: str) -> bool | None:
    """Return whether two texts of words are the same text; None if one of them is no text of words.

    One letter, two, or three consonants may be a product; names of functions are no words either.
    """
    words = [_TEXT.sub(r"\1", _SPACING.sub(" ", text)).strip() for text in (answer, label)]
    if not all(_WORDS.fullmatch(text) and _has_word(text) for text in words):
        return None
    return normalize(words[0]) == normalize(words[1])


def _has_word(text: str) -> bool:
    words = (word for word in re.findall(r"[^\W\d_]+", text) if not _FUNCTIONS.fullmatch(word))
    return any(len(word) > 3 or (len(word) == 3 and re.search("[aeiou]", word, re.IGNORECASE)) for word in words)


def differ(answer: str, label: str) -> bool:
    """Return whether two expressions differ in what math-verify overlooks: units, the base of numbers, sets and intervals."""
    forms = [_TEXT.sub(r"\1", _SPACING.sub(" ", text)).strip() for text in (answer, label)]
    brackets = [next((kind for start, kind in _BRACKETS.items() if form.startswith(start)), None) for form in forms]
    bases = [_BASE.search(form) for form in forms]
    units = [_unit(form) for form in forms]
    return (
        (None not in brackets and brackets[0] != brackets[1])
        or (bases[0] and bases[0][1]) != (bases[1] and bases[1][1])
        or ("" not in units and units[0] != units[1])
    )


def _unit(text: str) -> str:
    match = _UNIT.search(text)
    unit = _UNITS.get(match[1].lower(), "") if match else ""
    return f"{unit}^{match[2] or 1}" if match and unit else ""


LIMIT_S = 6.0
"""Seconds for one pair of expressions; math-verify's own limits, of 2 s each, mostly apply first."""
START_S = 120.0
"""Seconds a worker may take to import its libraries."""
WORKERS = max(2, min(8, os.cpu_count() or 1))
"""Maximal number of worker processes."""


def equivalent(answer: str, label: str) -> bool:
    r"""Return whether two expressions, LaTeX or plain, are equivalent: ``\frac{1}{2}`` and ``0.5`` are, ``4\%`` and ``0.04``.

    Words are compared as text. A unit counts if both have one.

    An answer that cannot be parsed, or not compared within `LIMIT_S`, is not equivalent, and neither is an answer that ends two
    workers. May be called from any thread, and blocks it.

    Raises:
        ValueError: the label cannot be parsed.
        RuntimeError: a worker does not start.
    """
    return _POOL.equivalent(answer, label)


class WorkerPool:
    """A pool of worker processes.

    Args:
        size: maximal number of processes; further callers wait.
        limit_s: seconds for one pair of expressions.
    """

    def __init__(self, size: int = WORKERS, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        """Seconds for one pair of expressions."""
        self._slots = threading.BoundedSemaphore(size)
        self._idle: list[_Worker] = []
        atexit.register(self.close)

    def equivalent(self, answer: str, label: str) -> bool:
        """Return whether the expressions are equivalent; see the function `equivalent`."""
        same_words = compare_words(answer, label)
        if same_words is not None:
            return same_words
        with self._slots:
            verdict = self._compare(rewrite(answer), rewrite(label), last=False)
        if verdict == UNREADABLE:
            raise ValueError(f"the label {label!r} is no mathematical expression that can be parsed")
        return verdict == SAME and not differ(answer, label)

    def _compare(self, answer: str, label: str, *, last: bool) -> str | None:
        """Return a worker's verdict. If something ends the worker, another one compares; a pair that ends both is the cause."""
        worker = self._take()
        try:
            verdict = worker.compare(answer, label, self.limit_s)
        except WorkerDied as died:
            worker.kill()
            return died.verdict if last else self._compare(answer, label, last=True)
        except BaseException:
            worker.kill()
            raise
        if worker.alive:
            self._idle.append(worker)
        return verdict

    def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
        return _Worker()

    def close(self) -> None:
        """End all idle workers. The pool can be used again."""
        while self._idle:
            self._idle.pop().kill()


class WorkerDied(Exception):
    """A worker ended by itself, or something killed it."""

    def __init__(self, verdict: str | None) -> None:
        """Record the verdict on a pair that ends every worker."""
        super().__init__(verdict)
        self.verdict = verdict


class _Worker:
    """One process that runs `agentrl.rewards.math_worker`; used by one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentrl.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run, not for its workers
        )
        self._buffer = b""
        try:
            line = self._read(time.monotonic() + START_S)
        except EOFError:
            line = None
        if line != READY:
            self.kill()
            raise RuntimeError(f"the math worker does not start: {line or 'no output'}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def compare(self, answer: str, label: str, limit_s: float) -> str | None:
        """Return the worker's verdict. A worker that times out is killed: the verdict is None, or `UNREADABLE` if it had not
        parsed the label yet.

        Raises:
            WorkerDied: with the same verdict.
        """
        deadline = time.monotonic() + limit_s
        request = json.dumps({"answer": answer, "label": label}) + "\n"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # of a dead worker, whose output has then ended
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        label_verdict = None
        try:
            label_verdict = self._read(deadline)
            verdict = self._read(deadline) if label_verdict == READABLE else UNREADABLE
        except EOFError:
            raise WorkerDied(None if label_verdict == READABLE else UNREADABLE) from None
        if verdict is None or label_verdict is None:
            self.kill()
        return verdict

    def _read(self, deadline: float) -> str | None:
        """Return the worker's next line, or None if it printed none before the deadline; `EOFError` if it ended."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or not select.select([descriptor], [], [], seconds_left)[0]:
                return None
            chunk = os.read(descriptor, 4096)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


_POOL = WorkerPool()
