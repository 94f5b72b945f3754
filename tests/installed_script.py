"""A script of this environment in a fork of a preloaded process: ``installed_script:main``, with its path and arguments.

As of an interpreter that starts it, the first entry of ``sys.path`` is the folder of the script and not the current one.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Run the script that the first argument names."""
    sys.argv = sys.argv[1:]
    sys.path[:] = [os.path.dirname(sys.argv[0]), *(folder for folder in sys.path if folder not in ("", os.getcwd()))]
    runpy.run_path(sys.argv[0], run_name="__main__")
