"""The command line of smolagents with the prompt from the standard input: a word of a command has 128 KiB at most."""

import sys

from smolagents.cli import main

if __name__ == "__main__":
    sys.argv.append(sys.stdin.read())
    main()
