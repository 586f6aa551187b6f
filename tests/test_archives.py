"""Archives from strangers: what is hostile is refused with a reason, and a skill is read without unpacking anything."""

import gzip
import io
import random
import stat
import tarfile
import tracemalloc
import zipfile

import pytest

from registry_server import skill_md, tar_of, zip_of
from skilltrain.data.collect import RefusalError
from skilltrain.data.collect.archives import read_skill_files

SKILL = skill_md("saw")
both_kinds = pytest.mark.parametrize("pack", [zip_of, tar_of], ids=["zip", "tar.gz"])


def refusal(content):
    """What is said of a refused archive, or of a broken one."""
    with pytest.raises((RefusalError, ValueError)) as caught:
        read_skill_files(content)
    said = str(caught.value)
    assert said.isascii() and "\n" not in said
    return said


def tar_with(*infos, **settings):
    """A tar archive of a SKILL.md and `infos`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **settings) as archive:
        for info in (tarfile.TarInfo("SKILL.md"), *infos):
            if info.isreg():
                info.size = len(SKILL)
            archive.addfile(info, io.BytesIO(SKILL) if info.isreg() else None)
    return buffer.getvalue()


def tar_entry(name, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def zip_entry(name, mode):
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


@pytest.mark.parametrize(
    "pack", [zip_of, tar_of, lambda files: tar_of(files, "w")], ids=["zip", "tar.gz", "tar"]
)
def test_skills_come_out_as_they_were_packed_without_the_folder_around_them(pack):
    files = {
        "SKILL.md": SKILL,
        "scripts/run.sh": b"echo",
        "empty": b"",
        "a/b/Skill.md": SKILL + b"x" * 70_000,
    }
    files["inner.zip"] = zip_of({"../../evil": b"x"})  # stays packed
    found = read_skill_files(
        pack({f"./repo-abc123//{name}": content for name, content in files.items()})
    )
    assert found == {"": SKILL, "a/b": files["a/b/Skill.md"]}
    assert read_skill_files(pack({"one/SKILL.md": SKILL, "README.md": b"x"})) == {"one": SKILL}
    assert read_skill_files(SKILL) == {"": SKILL}


@both_kinds
def test_a_name_that_leads_out_refuses_the_archive(pack):
    for name in (
        "../evil",
        "a/../../evil",
        "/etc/evil",
        "//evil",
        "C:/evil",
        "..\\evil",
        "\\\\host\\evil",
        "..",
    ):
        assert refusal(pack({"SKILL.md": SKILL, name: b"evil"})).startswith("unsafe_name: "), name


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_links_special_files_and_a_second_file_of_one_name_are_not_read():
    for kind in (
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.FIFOTYPE,
        tarfile.CHRTYPE,
        tarfile.GNUTYPE_SPARSE,
    ):
        assert read_skill_files(tar_with(tar_entry("trap/SKILL.md", kind, "/etc/passwd"))) == {
            "": SKILL
        }
    buffer = io.BytesIO(zip_of({"SKILL.md": SKILL}))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(zip_entry("trap/SKILL.md", stat.S_IFLNK | 0o777), "/etc/passwd")
        archive.writestr(zip_entry("pipe/SKILL.md", stat.S_IFIFO | 0o644), "")
        archive.writestr("SKILL.md", b"what a scanner does not see")
    assert read_skill_files(buffer.getvalue()) == {"": SKILL}


@both_kinds
def test_bombs_are_refused_by_size_and_by_count_and_a_large_skill_is_not_read(monkeypatch, pack):
    many = pack({"SKILL.md": SKILL, **{f"f{number}": b"" for number in range(20)}})
    monkeypatch.setattr("skilltrain.data.collect.archives.MAX_FILES", 10)
    assert "more than 10 files" in refusal(many)
    zeros = pack({"SKILL.md": SKILL, "zeros": bytes(3_000_000)})
    assert len(zeros) < 15_000 and read_skill_files(zeros) == {"": SKILL}
    monkeypatch.setattr("skilltrain.data.collect.archives.MAX_UNPACKED_BYTES", 100_000)
    assert "100,000 bytes" in refusal(zeros)
    # what stands behind the last member of a tar counts
    assert "100,000 bytes" in refusal(gzip.compress(tar_with() + bytes(900_000)))
    monkeypatch.setattr("skilltrain.data.collect.archives.MAX_SKILL_BYTES", 20)
    assert "no SKILL.md of at most 20 bytes" in refusal(pack({"SKILL.md": SKILL}))


@pytest.mark.parametrize(
    "pack", [lambda content: gzip.compress(content, 1), bytes], ids=["tar.gz", "tar"]
)
def test_a_bomb_in_a_header_is_not_taken_into_memory(pack):
    header = tar_entry("x", tarfile.XHDTYPE)
    header.size = 20_000_000
    content = pack(header.tobuf() + bytes(20_000_000))
    tracemalloc.start()
    assert "holds a header of 20,000,256 bytes" in refusal(content)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def hostile():
    """(content, filter and beginning of its reason) of what is no archive, is none that we read, or is broken."""
    other = "unknown_format: is neither .zip"
    yield from ((b"7z\xbc\xaf\x27\x1c" + bytes(50), other), (b"BZh9" + bytes(range(256)), other))
    yield b"\n <!DOCTYPE html><html>", "cannot be unpacked: 'it is an HTML page'"
    yield b'{"error": "log in"}', "cannot be unpacked: 'it is a JSON object'"
    yield gzip.compress(SKILL, mtime=0), "cannot be unpacked: "
    yield from ((zip_of(files), "no_skill_file: ") for files in ({}, {"README.md": b"x"}))
    encrypted = bytearray(zip_of({"SKILL.md": SKILL, "secret": b"x"}))
    encrypted[encrypted.rfind(b"PK\x01\x02") + 8] |= 1
    yield bytes(encrypted), "unknown_format: 'secret' is encrypted"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("SKILL.md", SKILL)
    yield buffer.getvalue(), "unknown_format: 'SKILL.md' is compressed by method 14"
    files = {"SKILL.md": SKILL, "noise": random.Random(0).randbytes(5000)}
    for content in (zip_of(files), tar_of(files)):
        yield from (
            (content[:place], "cannot be unpacked: ")
            for place in (len(content) // 2, len(content) - 30)
        )
    wrong_crc = bytearray(zip_of(files))
    wrong_crc[50] ^= 255
    yield bytes(wrong_crc), "cannot be unpacked: "
    negative_size = bytearray(tar_with()[:512])
    negative_size[124:136] = b"\xff" * 12
    negative_size[148:156] = b" " * 8
    negative_size[148:156] = f"{sum(negative_size):06o}\0 ".encode()
    yield bytes(negative_size) + bytes(2048), "cannot be unpacked: "
    long_names = tar_with(tar_entry("n" * 150), format=tarfile.GNU_FORMAT)[1024:2048] * 3000
    yield long_names + bytes(1024), "cannot be unpacked: "


def test_what_is_no_skill_or_is_broken_is_refused():
    for content, message in hostile():
        assert refusal(content).startswith(message), content[:40]


def test_any_damage_ends_in_skills_or_a_refusal():
    """200 archives with a few random bytes changed: no other exception."""
    draw = random.Random(7)
    files = {"SKILL.md": SKILL, "sub/x.txt": b"text " * 50}
    long = tar_with(
        tar_entry("long/" * 22 + "SKILL.md"), tar_entry("link", tarfile.SYMTYPE, "SKILL.md")
    )
    assert "/".join(["long"] * 22) in read_skill_files(long)
    for number in range(200):
        content = bytearray((zip_of(files), tar_of(files), tar_of(files, "w"), long)[number % 4])
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.choice(
                [0, 255, 47, 46, draw.randrange(256)]
            )
        try:
            assert read_skill_files(bytes(content))
        except (RefusalError, ValueError) as error:
            assert type(error) in (RefusalError, ValueError) and str(error)
