"""Runs commands in a process that cannot import some packages, as if these were not installed."""

from __future__ import annotations

import contextlib
import io
import json
import sys

PLUGINS = ("agentrl", "agentrl_configs", "agentrl_envs", "agentrl_tasks", "agentrl_tools")


def main() -> int:
    """Print the status and the output of each command: ``PACKAGES COMMANDS``, both JSON.

    Modules of agentrl and of the packages that this process has imported before are imported again, or are not there.
    """
    packages, commands = map(json.loads, sys.argv[1:])
    for name in list(sys.modules):
        if name.partition(".")[0] in (*packages, *PLUGINS):
            del sys.modules[name]
    for package in packages:
        sys.modules[package] = None  # type: ignore[assignment]
    from agentrl.cli.main import main as agentrl

    results = {}
    for name, words in commands.items():
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                status: object = agentrl(words)
            except SystemExit as end:
                status = end.code or 0
        results[name] = [status, " ".join(out.getvalue().split())]
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
