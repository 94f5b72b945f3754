"""Archives of machines: what comes out is checked, what goes in is named as it should be."""

import io
import tarfile
from collections.abc import Iterator

import pytest

from agentrl.containers import archives
from agentrl.containers.archives import MOST_DEPTH, DownloadError, check, pack
from agentrl.containers.spec import MachineSpec, ServiceSpec


def archive(*members: tuple[str, bytes, bytes | str]) -> list[bytes]:
    """An archive of (name, type, content or target of a link)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o4755
            if isinstance(content, str):
                member.linkname = content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return [buffer.getvalue()]


def test_links_stay_inside() -> None:
    download = check(
        archive(
            ("out/a", tarfile.REGTYPE, b"1"),
            ("out/hard", tarfile.LNKTYPE, "out/a"),
            ("out/far", tarfile.LNKTYPE, "etc/passwd"),
            ("out/d/in", tarfile.SYMTYPE, "../a"),
            ("out/d/up", tarfile.SYMTYPE, "../../etc"),
            ("out/d/down_up", tarfile.SYMTYPE, "x/../../../etc"),
            ("out/root", tarfile.SYMTYPE, "/etc/passwd"),
            ("out/device", tarfile.CHRTYPE, ""),
            ("../up", tarfile.REGTYPE, b"2"),
        ),
        100,
    )
    assert download.files() == {"out/a": b"1", "out/hard": b"1"}
    assert download.left_out == ("out/far", "out/d/up", "out/d/down_up", "out/root", "out/device", "../up")
    with tarfile.open(fileobj=io.BytesIO(download.tar)) as tar:
        assert tar.getmember("out/d/in").linkname == "../a"
        assert tar.getmember("out/a").mode == 0o755


def test_size_counts_linked_files_each_time() -> None:
    files = archive(
        ("out/a", tarfile.REGTYPE, b"1" * 60), *((f"out/{number}", tarfile.LNKTYPE, "out/a") for number in range(2))
    )
    with pytest.raises(DownloadError, match="more than 150 bytes"):
        check(files, 150)
    assert len(check(files, 180).files()) == 3


def test_what_is_too_large_is_refused_before_it_is_read() -> None:
    def chunks() -> Iterator[bytes]:
        member = tarfile.TarInfo("out/sparse")
        member.size = 2**40
        yield member.tobuf() + bytes(tarfile.RECORDSIZE)
        raise AssertionError("the content is read")

    with pytest.raises(DownloadError, match="more than 100 bytes"):
        check(chunks(), 100)
    with pytest.raises(DownloadError, match="more than 100 bytes"):
        check(archive(*((f"out/{number}", tarfile.REGTYPE, b"") for number in range(2100))), 100)
    with pytest.raises(DownloadError, match="cannot be read"):
        check([b"no archive" * 60], 100)


def test_folders_are_not_deeper_than_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "/".join(["out", *"a" * MOST_DEPTH])
    assert len(check(archive((deep, tarfile.REGTYPE, b"")), 100).files()) == 1
    with pytest.raises(DownloadError, match="more than 100 folders"):
        check(archive((f"{deep}/b", tarfile.REGTYPE, b"")), 100)
    monkeypatch.setattr(archives, "MOST_FILES", 2)
    with pytest.raises(DownloadError, match="more than 2 files"):
        check(archive(*((f"out/{number}", tarfile.REGTYPE, b"") for number in range(3))), 100)


def test_packed_names_stay_below_the_folder() -> None:
    with pytest.raises(ValueError, match="leads out of the folder"):
        pack({"../a": b""}, "tests", (0, 0), None)


def test_specs_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="in a circle: a, b"):
        MachineSpec(
            image="i",
            services=tuple(
                ServiceSpec(name=name, image="i", depends_on=(other_name,)) for name, other_name in ("ab", "ba")
            ),
        )
    with pytest.raises(ValueError, match="either an image or a build"):
        MachineSpec()
    with pytest.raises(ValueError, match="allowed_hosts needs network=allowlist"):
        MachineSpec(image="i", allowed_hosts=("a",))
