"""Takes the dashboard's libraries from npm again, in the versions of `libraries.json`, and writes their checksums there.

make libraries
"""

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parents[2] / "agentrl" / "dashboard" / "static" / "vendor"
LIST = VENDOR / "libraries.json"


def main() -> None:
    libraries = json.loads(LIST.read_text())
    for name, library in libraries.items():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["npm", "pack", "--silent", f"{name}@{library['version']}"], cwd=folder, check=True)
            (archive,) = Path(folder).glob("*.tgz")
            with tarfile.open(archive) as packed:
                for file, entry in library["files"].items():
                    member = packed.extractfile(f"package/{entry['path']}")
                    assert member is not None, entry
                    content = member.read()
                    (VENDOR / file).write_bytes(content)
                    entry["sha256"] = hashlib.sha256(content).hexdigest()
    LIST.write_text(json.dumps(libraries, indent=2) + "\n")


if __name__ == "__main__":
    main()
