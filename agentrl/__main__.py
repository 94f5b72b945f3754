"""``python -m agentrl``: the command ``agentrl``."""

import sys

from agentrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
