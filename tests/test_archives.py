"""Archives from strangers: what is hostile is refused with a reason, and nothing is ever written beside the folder."""

import gzip
import io
import random
import stat
import struct
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry_server import skill_md, tar_of, zip_of
from skilltrain.data.collect import RefusalError
from skilltrain.data.collect.archives import kind_of, path_parts, unpack

SKILL = skill_md("saw")


def unpacked(content, root):
    """(the folder's files → content, what was left out)."""
    folder = root / "box" / "skill"
    left_out = unpack(content, folder)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}, left_out


def refusal(content, root):
    """The error of a refused archive, after a look that nothing was left or written anywhere."""
    with pytest.raises(RefusalError) as caught:
        unpacked(content, root)
    assert list(root.rglob("*")) == [root / "box"]
    return caught.value


def tar_with(*infos, content=SKILL, **settings):
    """A tar archive of a SKILL.md and `infos`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **settings) as archive:
        for info in (tarfile.TarInfo("SKILL.md"), *infos):
            if info.isreg():
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return buffer.getvalue()


def tar_entry(name, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def zip_entry(name, mode):
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


@pytest.mark.parametrize("pack", [zip_of, tar_of, lambda files: tar_of(files, "w")], ids=["zip", "tar.gz", "tar"])
def test_a_skill_comes_out_as_it_was_packed_without_the_folder_around_it(tmp_path, pack):
    files = {"SKILL.md": SKILL, "scripts/run.sh": b"echo", "empty": b"", "a/b/c/d.txt": b"x" * 70_000}
    files["inner.zip"] = zip_of({"../../evil": b"x"})  # stays packed
    found, result = unpacked(pack({f"./repo-abc123//{name}": content for name, content in files.items()}), tmp_path)
    assert (found, result) == (files, {})
    assert unpacked(SKILL, tmp_path / "text")[0] == {"SKILL.md": SKILL}
    assert not (tmp_path / "box/skill/scripts/run.sh").stat().st_mode & 0o111


HOSTILE_NAMES = [
    "../evil", "a/../../evil", "/etc/evil", "//evil", "C:/evil", "..\\evil", "\\\\host\\evil", "a/\x01b",
    "line\nbreak", "..", ". ./evil", ".../evil", "\uff0e\uff0e/evil", "a\uff0fb", "\u2025/evil", "a\uff3cb",
    "safe\u202etxt.exe", "x" * 300, "\x7fdel",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
@pytest.mark.parametrize("pack", [zip_of, tar_of], ids=["zip", "tar"])
def test_a_name_that_leads_out_or_deceives_refuses_the_archive(tmp_path, pack, name):
    error = refusal(pack({"SKILL.md": SKILL, name: b"evil"}), tmp_path)
    assert error.filter == "unsafe_name"
    assert error.reason.isascii() and "\n" not in error.reason


def test_what_stands_behind_a_nul_in_a_zip_name_is_seen(tmp_path):
    content = zip_of({"SKILL.md": SKILL, "good.md#../evil": b"x"}).replace(b"good.md#", b"good.md\0")
    assert refusal(content, tmp_path).filter == "unsafe_name"


@given(st.text(max_size=40))
def test_a_name_leads_below_its_folder_or_is_refused(name):
    try:
        parts = path_parts(name)
    except RefusalError:
        return
    assert not {"..", "", "."} & set(parts)
    assert not any(char in part for part in parts for char in "/\\\0")
    assert Path("/box/skill", *parts).is_relative_to("/box/skill")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("target", ["/etc/passwd", "../../evil", "SKILL.md"])
def test_links_in_a_tar_are_left_out_and_nothing_is_written_through_them(tmp_path, kind, target):
    (tmp_path / "evil").mkdir()
    link = tar_entry("trap", kind, str(tmp_path / "evil") if target == "/etc/passwd" else target)
    found, result = unpacked(tar_with(link, tar_entry("trap/loot.md")), tmp_path)
    assert (found, result) == ({"SKILL.md": SKILL, "trap/loot.md": SKILL}, {"link": 1})
    assert list((tmp_path / "evil").iterdir()) == []


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_links_special_files_and_a_second_file_of_one_name_in_a_zip_are_left_out(tmp_path):
    buffer = io.BytesIO(zip_of({"SKILL.md": SKILL}))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(zip_entry("trap", stat.S_IFLNK | 0o777), "/etc/passwd")
        archive.writestr(zip_entry("pipe", stat.S_IFIFO | 0o644), "")
        archive.writestr("SKILL.md", b"what a scanner does not see")
    found, result = unpacked(buffer.getvalue(), tmp_path)
    assert (found, result) == ({"SKILL.md": SKILL}, {"link": 1, "special_file": 1, "collision": 1})


@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE])
def test_devices_and_pipes_are_left_out(tmp_path, kind):
    assert unpacked(tar_with(tar_entry("special", kind)), tmp_path) == ({"SKILL.md": SKILL}, {"special_file": 1})


def test_of_paths_that_some_file_system_takes_for_one_the_first_is_written(tmp_path):
    files = {"SKILL.md": SKILL, "skill.md": b"other", "a": b"file", "a/b": b"below a file", "c/d": b"1", "C": b"2"}
    files |= {"Fi\u0301": b"1", "f\u00ed": b"2"}
    found, result = unpacked(zip_of(files), tmp_path)
    assert found == {"SKILL.md": SKILL, "a": b"file", "c/d": b"1", "Fi\u0301": b"1"}
    assert result == {"collision": 4}


@pytest.mark.parametrize("pack", [zip_of, tar_of], ids=["zip", "tar.gz"])
def test_bombs_are_refused_by_ratio_by_size_and_by_count_and_a_large_file_is_left_out(tmp_path, monkeypatch, pack):
    zeros = pack({"SKILL.md": SKILL, "zeros": bytes(3_000_000)})
    assert len(zeros) < 15_000
    assert "more than 200 times" in refusal(zeros, tmp_path).reason
    many = pack({"SKILL.md": SKILL, **{f"f{number}": b"" for number in range(20)}})
    monkeypatch.setattr("skilltrain.data.collect.archives.MAX_FILES", 10)
    assert "more than 10 files" in refusal(many, tmp_path).reason
    noise = pack({"SKILL.md": SKILL, **{f"n{i}": random.Random(i).randbytes(40_000) for i in range(6)}})
    monkeypatch.setattr("skilltrain.data.collect.archives.MAX_FILE_BYTES", 39_999)
    assert unpacked(noise, tmp_path)[1] == {"file_too_big": 6}
    monkeypatch.setattr("skilltrain.data.collect.archives.MAX_UNPACKED_BYTES", 100_000)
    assert "100,000 bytes" in refusal(noise, tmp_path / "b").reason


@pytest.mark.parametrize("pack", [lambda content: gzip.compress(content, 1), bytes], ids=["tar.gz", "tar"])
def test_a_bomb_in_a_header_is_not_taken_into_memory(tmp_path, pack):
    header = tar_entry("x", tarfile.XHDTYPE)
    header.size = 20_000_000
    content = pack(header.tobuf() + bytes(20_000_000))
    tracemalloc.start()
    assert "holds a header of 20,000,256 bytes" in refusal(content, tmp_path).reason
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_zeros_behind_the_last_member_of_a_tar_count(tmp_path):
    assert "more than 200 times" in refusal(gzip.compress(tar_with() + bytes(9_000_000)), tmp_path).reason


def test_encryption_unknown_compression_and_a_giant_directory_are_refused(tmp_path):
    content = bytearray(zip_of({"SKILL.md": SKILL, "secret": b"x"}))
    content[content.rfind(b"PK\x01\x02") + 8] |= 1
    error = refusal(bytes(content), tmp_path)
    assert (error.filter, "'secret' is encrypted" in error.reason) == ("unknown_format", True)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("SKILL.md", SKILL)
    assert "method 14" in refusal(buffer.getvalue(), tmp_path).reason
    content = zip_of({"SKILL.md": SKILL})
    end = content.rfind(b"PK\x05\x06")
    giant = content[: end + 12] + struct.pack("<L", 2**31) + content[end + 16 :]
    assert refusal(giant, tmp_path).filter == "broken_archive"


def test_a_wrong_crc_a_cut_a_negative_size_and_a_chain_of_headers_are_refused(tmp_path):
    files = {"SKILL.md": SKILL, "noise": random.Random(0).randbytes(5000)}
    for pack in (zip_of, tar_of):
        content = pack(files)
        for place in (len(content) // 2, len(content) - 30):
            assert refusal(content[:place], tmp_path).filter == "broken_archive"
    content = bytearray(zip_of(files))
    content[2000] ^= 255
    assert refusal(bytes(content), tmp_path).filter == "broken_archive"
    block = bytearray(tar_with()[:512])
    block[124:136] = b"\xff" * 12
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    assert refusal(bytes(block) + bytes(2048), tmp_path).filter == "broken_archive"
    long_name = tar_with(tar_entry("n" * 150), format=tarfile.GNU_FORMAT)[1024:2048]
    assert refusal(long_name * 3000 + bytes(1024), tmp_path).filter in ("broken_archive", "bomb")


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_long_path_in_a_pax_or_gnu_header_is_read(tmp_path, form):
    name = "/".join(["folder"] * 25) + "/file-with-a-name-that-takes-some-room.md"
    assert name in unpacked(tar_with(tar_entry(name), format=form), tmp_path)[0]


@pytest.mark.parametrize(
    ("content", "kind", "filter"),
    [
        (b"7z\xbc\xaf\x27\x1c" + bytes(50), "other", "unknown_format"),
        (b"BZh9" + bytes(range(256)), "other", "unknown_format"),
        (b"\n <!DOCTYPE html><html>", "html", "unknown_format"),
        (b'{"error": "log in"}', "json", "unknown_format"),
        (gzip.compress(SKILL, mtime=0), "gzip", "unknown_format"),
        (zip_of({}), "zip", "no_skill_file"),
        (zip_of({"README.md": b"x"}), "zip", "no_skill_file"),
    ],
)
def test_what_is_no_skill_is_refused(tmp_path, content, kind, filter):
    assert refusal(content, tmp_path).filter == filter
    assert kind_of(content) == kind


def test_any_damage_ends_in_a_skill_or_a_refusal(tmp_path):
    """200 archives with a few random bytes changed: no other exception, nothing outside the folder."""
    draw = random.Random(7)
    files = {"SKILL.md": SKILL, "sub/x.txt": b"text " * 50}
    long = tar_with(tar_entry("long/" * 22 + "name.md"), tar_entry("link", tarfile.SYMTYPE, "SKILL.md"))
    for number in range(200):
        content = bytearray((zip_of(files), tar_of(files), tar_of(files, "w"), long)[number % 4])
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.choice([0, 255, 47, 46, draw.randrange(256)])
        root = tmp_path / str(number)
        root.mkdir()
        try:
            unpacked(bytes(content), root)
        except RefusalError as error:
            assert error.reason
        assert {path.name for path in root.iterdir()} == {"box"}
        assert {path.name for path in (root / "box").iterdir()} <= {"skill"}
        assert not any(path.is_symlink() for path in root.rglob("*"))
