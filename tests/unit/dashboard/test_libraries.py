"""The libraries in the wheel are those of `libraries.json`, with their licences."""

import hashlib
import json
from importlib.resources import files

VENDOR = files("agentrl.dashboard") / "static" / "vendor"
LIBRARIES = json.loads((VENDOR / "libraries.json").read_text())


def test_files_are_as_published() -> None:
    for name, library in LIBRARIES.items():
        for file, entry in library["files"].items():
            assert hashlib.sha256((VENDOR / file).read_bytes()).hexdigest() == entry["sha256"], (name, file)


def test_each_library_has_its_licence_and_nothing_else_is_there() -> None:
    listed = {file for library in LIBRARIES.values() for file in library["files"]}
    assert {path.name for path in VENDOR.iterdir()} == {*listed, "libraries.json"}
    for name, library in LIBRARIES.items():
        licences = [file for file in library["files"] if file.endswith("LICENSE")]
        assert len(licences) == 1, name
        assert "Permission is hereby granted" in (VENDOR / licences[0]).read_text()
