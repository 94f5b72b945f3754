"""Generated problems of other kinds, with one or two parameters each: for policies that already can program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from textwrap import dedent

from .problem import Problem

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_pairs(rng: Random) -> Problem:
    """Draw a problem: count pairs of numbers with a given sum."""
    total = rng.randint(5, 40)

    def solve(text: str) -> str:
        numbers = [int(word) for word in text.split()[1:]]
        return f"{sum(a + b == total for i, a in enumerate(numbers) for b in numbers[:i])}\n"

    def draw(rng: Random) -> str:
        numbers = [rng.randint(-10, 40) for _ in range(rng.randint(1, 60))]
        return f"{len(numbers)}\n{' '.join(map(str, numbers))}\n"

    return Problem(
        "pairs",
        f"pairs/{total}",
        "The first line holds n, the second line n integers. Print in how many ways two of them, at different places, "
        f"add up to {total}. The order of the two does not matter.",
        _code(
            f"""
            input()
            seen, found = {{}}, 0
            for x in map(int, input().split()):
                found += seen.get({total} - x, 0)
                seen[x] = seen.get(x, 0) + 1
            print(found)
            """
        ),
        solve,
        draw,
    )


def draw_words(rng: Random) -> Problem:
    """Draw a problem: list words that contain a letter a number of times."""
    letter, times = rng.choice(_LETTERS[:8]), rng.randint(1, 3)

    def solve(text: str) -> str:
        words_found = sorted(
            {word for word in text.split()[1:] if word.count(letter) >= times}, key=lambda w: (-len(w), w)
        )
        return "".join(f"{word}\n" for word in words_found) or "none\n"

    def draw(rng: Random) -> str:
        words = ["".join(rng.choice(_LETTERS[:8]) for _ in range(rng.randint(1, 8))) for _ in range(rng.randint(1, 25))]
        return f"{len(words)}\n" + "\n".join(words) + "\n"

    return Problem(
        "words",
        f"words/{letter}/{times}",
        f"The first line holds n; n words follow, one a line. Print the different words that hold the letter '{letter}' at "
        f"least {times} time{'s' if times > 1 else ''}, one a line, longer ones first and those of one length in "
        "alphabetical order. Print none if there is no such word.",
        _code(
            f"""
            words = {{input().strip() for _ in range(int(input()))}}
            found = sorted((w for w in words if w.count("{letter}") >= {times}), key=lambda w: (-len(w), w))
            print("\\n".join(found) if found else "none")
            """
        ),
        solve,
        draw,
    )


def draw_intervals(rng: Random) -> Problem:
    """Draw a problem: length covered by a number of intervals."""
    times, exactly = rng.randint(1, 5), rng.random() < 0.5

    def solve(text: str) -> str:
        rows = [tuple(map(int, line.split())) for line in text.splitlines()[1:]]
        depths = [sum(a <= x < b for a, b in rows) for x in range(200)]
        return f"{sum(depth == times if exactly else depth >= times for depth in depths)}\n"

    def draw(rng: Random) -> str:
        rows = [sorted(rng.sample(range(200), 2)) for _ in range(rng.randint(1, 30))]
        return f"{len(rows)}\n" + "".join(f"{a} {b}\n" for a, b in rows)

    return Problem(
        "intervals",
        f"intervals/{'exactly' if exactly else 'at least'}/{times}",
        "The first line holds n; n lines follow with two integers a < b each, the interval from a to b. Print the length "
        f"of all places together that lie in {'exactly' if exactly else 'at least'} {times} of the intervals.",
        _code(
            f"""
            ends = []
            for _ in range(int(input())):
                a, b = map(int, input().split())
                ends += [(a, 1), (b, -1)]
            depth = covered = last = 0
            for place, step in sorted(ends):
                if depth {"==" if exactly else ">="} {times}:
                    covered += place - last
                depth, last = depth + step, place
            print(covered)
            """
        ),
        solve,
        draw,
    )


def draw_walk(rng: Random) -> Problem:
    """Draw a problem: shortest path through a grid, with a given set of moves."""
    name, moves = rng.choice(sorted(_MOVES.items()))

    def solve(text: str) -> str:
        grid = text.split()[2:]
        reached, front, steps = {(0, 0)}, [(0, 0)], 0
        goal = (len(grid) - 1, len(grid[0]) - 1)
        while front and goal not in reached:
            steps += 1
            new = {(r + a, c + b) for r, c in front for a, b in moves}
            front = [at for at in new - reached if _free(grid, *at)]
            reached.update(front)
        return f"{steps if goal in reached else -1}\n"

    def draw(rng: Random) -> str:
        rows, columns = rng.randint(2, 9), rng.randint(2, 9)
        grid = [["#" if rng.random() < 0.25 else "." for _ in range(columns)] for _ in range(rows)]
        grid[0][0] = grid[-1][-1] = "."
        return f"{rows} {columns}\n" + "".join("".join(row) + "\n" for row in grid)

    return Problem(
        "walk",
        f"walk/{name}",
        "The first line holds r and c; r lines of c characters follow: a map, with . for free fields and # for walls. "
        f"Print the least number of moves from the upper left field to the lower right one. A move goes to {name}, "
        "never onto a wall. Print -1 if there is no way. Both fields are free.",
        _code(
            f"""
            from collections import deque
            r, c = map(int, input().split())
            grid = [input() for _ in range(r)]
            steps, todo = {{(0, 0): 0}}, deque([(0, 0)])
            while todo:
                y, x = todo.popleft()
                for a, b in {moves!r}:
                    at = (y + a, x + b)
                    if at not in steps and 0 <= at[0] < r and 0 <= at[1] < c and grid[at[0]][at[1]] == ".":
                        steps[at] = steps[y, x] + 1
                        todo.append(at)
            print(steps.get((r - 1, c - 1), -1))
            """
        ),
        solve,
        draw,
    )


def draw_coins(rng: Random) -> Problem:
    """Draw a problem: the fewest coins for an amount."""
    coins = sorted({1, *rng.sample(range(2, 26), 3)})[rng.randint(0, 1) :]

    def solve(text: str) -> str:
        answers = []
        for amount in map(int, text.split()[1:]):
            reached, count = {0}, 0
            while amount not in reached and min(reached) <= amount:
                reached = {have + coin for have in reached for coin in coins if have + coin <= amount} or {amount + 1}
                count += 1
            answers.append(count if amount in reached else -1)
        return "".join(f"{answer}\n" for answer in answers)

    def draw(rng: Random) -> str:
        amounts = [rng.randint(0, 120) for _ in range(rng.randint(1, 8))]
        return f"{len(amounts)}\n{' '.join(map(str, amounts))}\n"

    shown = ", ".join(map(str, coins[:-1])) + f" and {coins[-1]}"
    return Problem(
        "coins",
        f"coins/{coins}",
        f"There are coins of {shown}, as many as are needed. The first line holds n, the second line n amounts. Print for "
        "each amount, one a line, the least number of coins that make it, or -1 where none do.",
        _code(
            f"""
            input()
            for amount in map(int, input().split()):
                least = [0] + [None] * amount
                for have in range(1, amount + 1):
                    ways = [least[have - c] for c in {coins} if c <= have and least[have - c] is not None]
                    least[have] = min(ways) + 1 if ways else None
                print(-1 if least[amount] is None else least[amount])
            """
        ),
        solve,
        draw,
    )


_MOVES: Mapping[str, list[tuple[int, int]]] = {
    "the field above, below, left or right": [(0, 1), (1, 0), (0, -1), (-1, 0)],
    "one of the eight fields around": [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b],
    "the field to the right, the field below, or the one to the lower left": [(0, 1), (1, 0), (1, -1)],
    "where a knight of chess may go": [(a, b) for a in (-2, -1, 1, 2) for b in (-2, -1, 1, 2) if abs(a) != abs(b)],
}


def _free(grid: list[str], row: int, column: int) -> bool:
    return 0 <= row < len(grid) and 0 <= column < len(grid[0]) and grid[row][column] == "."


def _code(text: str) -> str:
    return dedent(text).lstrip("\n")


CLASSICS: Mapping[str, Callable[[Random], Problem]] = {
    "pairs": draw_pairs,
    "words": draw_words,
    "intervals": draw_intervals,
    "walk": draw_walk,
    "coins": draw_coins,
}
