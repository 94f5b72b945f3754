"""Kinds of exercises, from easy to hard. Each function makes one exercise of its kind with names and numbers of a generator."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from textwrap import dedent

from .exercise import WORK, Exercise

COLORS = ("amber", "black", "blue", "brown", "coral", "gold", "green", "grey", "indigo", "ivory", "lilac", "lime", "maroon",
          "olive", "orange", "pink", "plum", "purple", "red", "silver", "teal", "white", "yellow")  # fmt: skip
THINGS = ("anchor", "bell", "boat", "book", "bridge", "candle", "chair", "clock", "cup", "door", "drum", "engine", "feather",
          "flag", "garden", "hammer", "kettle", "ladder", "lamp", "map", "mirror", "needle", "oven", "pencil", "piano", "rope",
          "saddle", "shell", "table", "tent", "wheel", "window")  # fmt: skip
NAMES = ("ada", "alan", "barbara", "claude", "dana", "edsger", "emmy", "frances", "grace", "hedy", "john", "karen", "leslie",
         "linus", "margaret", "niklaus", "radia", "shafi", "tim", "vint")  # fmt: skip
KEYS = ("cache", "depth", "limit", "port", "retries", "size", "threads", "timeout", "width", "workers")
EVENTS = ("backup done", "cache empty", "disk slow", "job queued", "login", "page served", "sync done", "timer fired")


def _check(source: str) -> str:
    return dedent(source)


def _answer(expected: str) -> str:
    """Return a check that the file ``answer.txt`` has a text, whatever space is around it."""
    return _check(f"""\
        def solved():
            return (text("answer.txt") or "").strip() == {expected!r}
        """)


def write_file(rng: Random) -> Exercise:
    """Write a text into a file."""
    return _write(f"{rng.choice(THINGS)}.txt", f"{rng.choice(COLORS)} {rng.choice(THINGS)} {rng.randint(10, 99)}")


def _write(name: str, words: str) -> Exercise:
    return Exercise(
        kind="write_file",
        level=1,
        instruction=f"Write the text '{words}' into the file {WORK}/{name}.",
        commands=(f"echo '{words}' > {WORK}/{name}",),
        check=_check(f"""\
            def solved():
                return (text({name!r}) or "").strip() == {words!r}
            """),
    )


def copy_file(rng: Random) -> Exercise:
    """Copy one file of several into a folder that is not there yet."""
    names = rng.sample(THINGS, 3)
    files = {f"{name}.txt": f"{rng.choice(COLORS)} {rng.randint(100, 999)}\n" for name in names}
    name, folder = rng.choice(names), rng.choice([color for color in COLORS if color not in names])
    return Exercise(
        kind="copy_file",
        level=1,
        instruction=f"Create the folder {WORK}/{folder} and copy the file {WORK}/{name}.txt into it.",
        commands=(f"mkdir -p {WORK}/{folder}", f"cp {WORK}/{name}.txt {WORK}/{folder}/"),
        check=_check(f"""\
            def solved():
                return text({f"{folder}/{name}.txt"!r}) == {files[f"{name}.txt"]!r}
            """),
        files=files,
    )


def count_lines(rng: Random) -> Exercise:
    """Count the lines of a log that have a word."""
    level = rng.choice(("ERROR", "WARNING"))
    other_levels = ("INFO", "DEBUG", "WARNING" if level == "ERROR" else "ERROR")
    count = rng.randint(3, 30)
    levels = [level] * count + rng.choices(other_levels, k=rng.randint(20, 60))
    rng.shuffle(levels)
    log = "".join(f"{number:03d} {word} {rng.choice(EVENTS)}\n" for number, word in enumerate(levels, 1))
    name = f"{rng.choice(THINGS)}.log"
    return Exercise(
        kind="count_lines",
        level=1,
        instruction=f"Count the lines of {WORK}/{name} that contain {level}. Write the number into {WORK}/answer.txt.",
        commands=(f"grep -c {level} {WORK}/{name} > {WORK}/answer.txt",),
        check=_answer(str(count)),
        files={name: log},
    )


def find_file(rng: Random) -> Exercise:
    """Find the file that has a word."""
    word, *other_words = rng.sample(COLORS, 9)
    folders = rng.sample(NAMES, 3)
    paths = [f"notes/{folder}/{thing}.txt" for folder in folders for thing in rng.sample(THINGS, 3)]
    texts = [f"{color} {rng.choice(THINGS)}\n{rng.choice(THINGS)}\n" for color in other_words]
    texts.insert(rng.randrange(9), f"{rng.choice(THINGS)}\n{word} {rng.choice(THINGS)}\n")
    files = dict(zip(paths, texts, strict=True))
    answer = next(f"{WORK}/{path}" for path, text in files.items() if word in text)
    return Exercise(
        kind="find_file",
        level=2,
        instruction=(
            f"One file below {WORK}/notes contains the word {word}. Write the path of that file into {WORK}/answer.txt."
        ),
        commands=(f"grep -rl {word} {WORK}/notes > {WORK}/answer.txt",),
        check=_answer(answer),
        files=files,
    )


def sum_column(rng: Random) -> Exercise:
    """Add up the numbers of a column."""
    columns = rng.sample(("price", "count", "weight", "score", "age"), 3)
    rows = [[rng.randint(1, 60) for _ in columns] for _ in range(rng.randint(6, 14))]
    column = rng.randrange(3)
    lines = [",".join(["name", *columns]), *(",".join([rng.choice(THINGS), *map(str, row)]) for row in rows)]
    name = f"{rng.choice(THINGS)}.csv"
    return Exercise(
        kind="sum_column",
        level=2,
        instruction=f"Add up the column {columns[column]} of {WORK}/{name}. Write the sum into {WORK}/answer.txt.",
        commands=(f"awk -F, 'NR > 1 {{ s += ${column + 2} }} END {{ print s }}' {WORK}/{name} > {WORK}/answer.txt",),
        check=_answer(str(sum(row[column] for row in rows))),
        files={name: "\n".join([*lines, ""])},
        looks=(f"head -n 1 {WORK}/{name}",),
    )


def set_option(rng: Random) -> Exercise:
    """Change one option of a file, and nothing else."""
    return _set(rng, range(1000, 9999))


def _set(rng: Random, new_values: range) -> Exercise:
    keys = rng.sample(KEYS, 5)
    values = {key: rng.randint(1, 999) for key in keys}
    key = rng.choice(keys)
    value = rng.choice([number for number in new_values if number not in values.values()])
    name = f"{rng.choice(THINGS)}.conf"
    lines = [f"{option} = {number}" for option, number in values.items()]
    lines.insert(rng.randrange(5), f"# options of the {rng.choice(THINGS)}")
    old_text = "\n".join([*lines, ""])
    new_text = old_text.replace(f"{key} = {values[key]}\n", f"{key} = {value}\n")
    return Exercise(
        kind="set_option",
        level=2,
        instruction=f"In the file {WORK}/{name}, set the option {key} to {value}. Leave all other lines as they are.",
        commands=(f"sed -i 's/^{key} = .*/{key} = {value}/' {WORK}/{name}",),
        check=_check(f"""\
            def solved():
                return (text({name!r}) or "").rstrip() == {new_text.rstrip()!r}
            """),
        files={name: old_text},
    )


def unique_names(rng: Random) -> Exercise:
    """Write down the different names of a log in order."""
    names = rng.sample(NAMES, rng.randint(4, 8))
    visits = names + rng.choices(names, k=rng.randint(8, 20))
    rng.shuffle(visits)
    pages = rng.sample(THINGS, 5)
    log = "".join(f"{rng.randint(8, 19):02d}:{rng.randint(0, 59):02d} {name} /{rng.choice(pages)}\n" for name in visits)
    expected = "\n".join(sorted(names))
    return Exercise(
        kind="unique_names",
        level=3,
        instruction=(
            f"Each line of {WORK}/visits.log has a time, a user and a page. Write the names of all users, each once, in "
            f"alphabetical order and one a line, into {WORK}/users.txt."
        ),
        commands=(f"cut -d ' ' -f 2 {WORK}/visits.log | sort -u > {WORK}/users.txt",),
        check=_check(f"""\
            def solved():
                return (text("users.txt") or "").strip() == {expected!r}
            """),
        files={"visits.log": log},
    )


def mend_script(rng: Random) -> Exercise:
    """Make a script run that names a file which is elsewhere."""
    data, folder = f"{rng.choice(THINGS)}.txt", rng.choice(("data", "input", "store", "files"))
    color, number = rng.choice(COLORS), rng.randint(100, 999)
    wrong = f"{rng.choice(COLORS)}/{data}"
    script = (
        f'#!/bin/sh\n# Prints the state of the machine.\nstate=$(cat {WORK}/{wrong}) || exit 1\necho "state: $state"\n'
    )
    return Exercise(
        kind="mend_script",
        level=3,
        instruction=(
            f"The script {WORK}/report.sh fails. It must print the text of the file {data}, which is somewhere below {WORK}. "
            f"Mend the script, and make it executable. {WORK}/report.sh must print 'state: ' and then the text of the file."
        ),
        commands=(
            f"sed -i 's|{WORK}/{wrong}|{WORK}/{folder}/{data}|' {WORK}/report.sh",
            f"chmod +x {WORK}/report.sh",
        ),
        check=_check(f"""\
            def solved():
                return output("{WORK}/report.sh") == {f"state: {color} {number}" + chr(10)!r}
            """),
        files={"report.sh": script, f"{folder}/{data}": f"{color} {number}\n"},
        looks=(f"cat {WORK}/report.sh", f"find {WORK} -name {data}"),
    )


FUNCTIONS: Mapping[str, tuple[str, str, str, tuple[tuple[object, ...], ...]]] = {
    "mean": (
        "values",
        "sum(values) / (len(values) + {n})",
        "sum(values) / len(values)",
        (([2, 4],), ([1, 2, 6],), ([5],)),
    ),
    "clamp": (
        "value, low, high",
        "min(low, max(high, value + {n}))",
        "max(low, min(high, value))",
        ((5, 1, 3), (0, 1, 3), (2, 1, 3)),
    ),
    "last": ("values", "values[{n}]", "values[-1]", (([1, 2, 3, 4, 5],), ([9],), ([3, 7],))),
    "is_even": ("number", "number % 2 == {n}", "number % 2 == 0", ((4,), (7,), (0,))),
    "add_tax": (
        "price, percent",
        "price + percent * {n}",
        "price + price * percent / 100",
        ((100, 5), (40, 50), (8, 0)),
    ),
    "initials": (
        "name",
        "''.join(word[{n}:] for word in name.split())",
        "''.join(word[0] for word in name.split())",
        (("ada lovelace",), ("grace",), ("a b c",)),
    ),
    "count_down": ("start", "list(range(start, {n}))", "list(range(start, 0, -1))", ((3,), (1,), (5,))),
    "reverse_words": (
        "line",
        "' '.join(line.split()[{n}:])",
        "' '.join(line.split()[::-1])",
        (("red green blue",), ("one",), ("x y",)),
    ),
}
"""Small functions by name: parameters, a wrong result with a number n, the right result, and arguments to test with."""


def fix_test(rng: Random) -> Exercise:
    """Make a failing test of five lines pass."""
    function = rng.choice(sorted(FUNCTIONS))
    parameters, wrong, right, cases = FUNCTIONS[function]
    names, module = parameters.split(", "), rng.choice(THINGS)
    values = [_value(right, dict(zip(names, arguments, strict=True))) for arguments in cases]
    shown = dict(zip(names, cases[0], strict=True))
    wrong = rng.choice([text for number in range(1, 10) if _value(text := wrong.format(n=number), shown) != values[0]])
    source = f"def {function}({parameters}):\n    return {wrong}\n"
    calls = [f"{function}({', '.join(map(repr, arguments))})" for arguments in cases]
    test = f"from {module} import {function}\n\nassert {calls[0]} == {values[0]!r}, {calls[0]}\nprint('passed')\n"
    return Exercise(
        kind="fix_test",
        level=4,
        instruction=(
            f"The test {WORK}/test_{module}.py fails: run it with 'python3 test_{module}.py' in {WORK}. Correct the function "
            f"{function} in {WORK}/{module}.py so that it is right for all arguments. Do not change the test."
        ),
        commands=(
            f"printf 'def {function}({parameters}):\\n    return %s\\n' \"{right}\" > {WORK}/{module}.py",
            f"python3 test_{module}.py",
        ),
        check=_check(f"""\
            def solved():
                import ast
                program = (
                    "import sys; sys.path.insert(0, sys.argv[1]); from {module} import {function}; print(repr(eval(sys.argv[2])))"
                )
                try:
                    printed = [output("python3", "-I", "-c", program, WORK, call) for call in {calls!r}]
                    return [ast.literal_eval((line or "").strip()) for line in printed] == {values!r}
                except (ValueError, SyntaxError):
                    return False
            """),
        files={f"{module}.py": source, f"test_{module}.py": test},
        looks=(f"cat {WORK}/{module}.py",),
    )


def _value(expression: str, variables: Mapping[str, object]) -> object:
    """Return the value of an expression of `FUNCTIONS`; None if it has none."""
    try:
        return eval(expression, {}, dict(variables))
    except (LookupError, ValueError):
        return None


_SERVER = '''\
"""Answers GET requests with the state of the service; the options are in config.json."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer

with open("{work}/{opened}") as file:
    CONFIG = json.load(file)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{{CONFIG['{read}']}} is up".encode()
        self.send_response({status} if self.path == "/{path}" else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


HTTPServer(("127.0.0.1", CONFIG["port"]), Handler).serve_forever()
'''


def mend_service(rng: Random) -> Exercise:
    """Mend a service that does not start, and then does not answer as it must."""
    name, port, path = rng.choice(THINGS), rng.randint(8000, 8999), rng.choice(("health", "state", "ready"))
    colors = rng.sample(COLORS, 2)
    right = {"opened": "config.json", "read": "name", "status": "200", "path": path}
    broken = {
        "opened": f"{colors[0]}.json",
        "read": rng.choice(("title", "label", "owner")),
        "status": rng.choice(("500", "503")),
        "path": colors[1],
    }
    faults = sorted(rng.sample(sorted(right), 2))
    source = _SERVER.format(work=WORK, **right | {fault: broken[fault] for fault in faults})
    return Exercise(
        kind="mend_service",
        level=4,
        instruction=(
            f"The service in {WORK}/server.py is broken. Mend it, so that 'python3 {WORK}/server.py' serves HTTP on port {port} "
            f"of 127.0.0.1, as {WORK}/config.json says, and GET /{path} is answered with status 200 and the text '{name} is up'. "
            f"Do not change {WORK}/config.json."
        ),
        commands=tuple(f"sed -i 's/{broken[fault]}/{right[fault]}/' {WORK}/server.py" for fault in faults),
        check=_check(f"""\
            def solved():
                import http.client, time
                server = start("python3", "{WORK}/server.py")
                try:
                    for _ in range(100):
                        try:
                            connection = http.client.HTTPConnection("127.0.0.1", {port}, timeout=5)
                            connection.request("GET", "/{path}")
                            reply = connection.getresponse()
                            return (reply.status, reply.read(1000)) == (200, b"{name} is up")
                        except ConnectionRefusedError:
                            if server.poll() is not None:
                                return False
                            time.sleep(0.1)
                    return False
                except (OSError, http.client.HTTPException):
                    return False
                finally:
                    stop(server)
            """),
        files={"server.py": source, "config.json": json.dumps({"name": name, "port": port}) + "\n"},
        looks=(f"cat {WORK}/server.py",),
    )


KINDS: Mapping[str, Callable[[Random], Exercise]] = {
    function.__name__: function
    for function in (
        write_file, copy_file, count_lines, find_file, sum_column, set_option, unique_names, mend_script, fix_test, mend_service,
    )
}  # fmt: skip
"""Kinds by name, from easy to hard."""


def write_long_text(rng: Random) -> Exercise:
    """Write a text of up to six words and numbers into a file."""
    words = [rng.choice((*COLORS, *THINGS)) if rng.random() < 0.5 else _number(rng) for _ in range(rng.randint(1, 6))]
    return _write(f"{rng.choice(THINGS)}.txt", " ".join(words))


def set_any_value(rng: Random) -> Exercise:
    """Change one option of a file to a number of one to six digits."""
    digits = rng.randint(1, 6)
    start = rng.randrange(10 ** (digits - 1), 10**digits - 1)
    return _set(rng, range(start, start + 7))


def _number(rng: Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 6)))


PRACTICE: Mapping[str, Callable[[Random], Exercise]] = {
    function.__name__: function for function in (write_long_text, set_any_value)
}
"""Exercises for demonstrations only, which teach a policy to copy numbers."""
