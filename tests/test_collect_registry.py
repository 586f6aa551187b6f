"""The example that collects the skills of a registry, against a real server on loopback."""

import io
import sys
import time
import zipfile
from email.utils import formatdate
from pathlib import Path

import httpx2
import pytest
import tenacity

from registry_server import Reply, registry_server, skill_md, tar_of, zip_of
from skilltrain.data.pool.read import read_pool
from skilltrain.files import read_jsonl

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import collect_registry

SKILL = skill_md("saw")


@pytest.fixture
def server(monkeypatch):
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    with registry_server() as server:
        yield server


@pytest.fixture
def collect(server, tmp_path):
    """() → the number of skills left out of skills.jsonl; the server's log is that of this run."""

    def run(**settings):
        server.paths.clear()
        registry = collect_registry.Registry(server.base_url, pause=0, **settings)
        return collect_registry.collect(registry, tmp_path / "skills.jsonl")

    return run


def texts_of(folder):
    """Return the SKILL.md text of each collected skill by its id."""
    rows = [row for _, row in read_jsonl(folder / "skills.jsonl")]
    return {row["skill_id"]: row["skill_md"] for row in rows}


def test_pool_reads_what_is_collected(server, collect, tmp_path):
    server.skills = {f"owner/s{number}": skill_md(f"skill {number}") for number in range(7)}

    num_refused = collect()

    names = {skill.skill_id: skill.name for skill in read_pool(tmp_path / "skills.jsonl")}

    assert num_refused == 0
    assert names == {f"owner/s{number}": f"skill {number}" for number in range(7)}


def test_second_run_fetches_changes_only(server, collect, tmp_path):
    server.skills = {"old": SKILL, "changed": SKILL, "gone": SKILL}
    collect()
    server.skills = {"old": SKILL, "changed": skill_md("drill"), "new": SKILL}
    server.versions = {"changed": "2"}

    collect()

    assert server.downloads() == ["changed", "new"]

    texts = texts_of(tmp_path)

    assert list(texts) == ["old", "changed", "new"]
    assert "name: drill" in texts["changed"]


def test_stopped_run_goes_on(server, collect, tmp_path):
    server.skills = {f"s{number}": SKILL for number in range(5)}
    server.script["/api/get/s3"] = [Reply(status=503, headers={"Retry-After": "7200"})]

    with pytest.raises(SystemExit, match=r"asks to wait 7,200 seconds: run again later"):
        collect()

    collect()

    assert server.downloads() == ["s3", "s4"]
    assert len(texts_of(tmp_path)) == 5


def test_failed_update_keeps_old_version(server, collect, tmp_path):
    server.skills = {"s": SKILL}
    collect()
    server.skills = {"s": b"<html>Log in"}
    server.versions = {"s": "2"}

    num_refused = collect()

    assert num_refused == 1
    assert texts_of(tmp_path) == {"s": SKILL.decode()}


def test_busy_registry_is_asked_again(server, collect):
    server.skills = {"s": SKILL}
    server.script["/api/get/s"] = [Reply(status=429, headers={"Retry-After": "0"})] * 2

    num_refused = collect()

    assert num_refused == 0
    assert server.downloads() == ["s"] * 3


def wait_after(retry_after):
    """Return the seconds before the next attempt after a reply with this header."""
    request = httpx2.Request("GET", "http://registry.test")
    response = httpx2.Response(503, headers={"Retry-After": retry_after}, request=request)
    error = httpx2.HTTPStatusError("busy", request=request, response=response)
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.set_exception((type(error), error, None))
    return collect_registry.seconds_to_wait(state)


@pytest.mark.parametrize(("header", "seconds"), [("", 1), ("33", 33), ("soon", 1)])
def test_retry_after_seconds_are_waited(header, seconds):
    assert wait_after(header) == seconds


def test_retry_after_date_is_awaited():
    date = formatdate(time.time() + 1_000, usegmt=True)

    assert 500 < wait_after(date) <= 1_000


def test_redirect_stays_in_registry(server, collect, tmp_path):
    server.skills = {"s": SKILL}
    server.script["/api/get/s"] = [Reply(status=302, headers={"Location": "/api/moved"})]
    server.script["/api/moved"] = [Reply(skill_md("moved"))]

    collect()

    assert "name: moved" in texts_of(tmp_path)["s"]


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://169.254.169.254/", "169.254.169.254 is not the registry"),
        ("file:///etc/passwd", "is not the registry"),
        ("http://localhost:1/", "localhost has the private address"),  # though it is named
        ("/api/get/s", "more than 5 redirects"),
    ],
)
def test_redirect_leads_nowhere_else(server, collect, capsys, location, message):
    server.skills = {"s": SKILL}
    server.script["/api/get/s"] = [Reply(status=302, headers={"Location": location})] * 6

    num_refused = collect(allowed_hosts=["localhost"])

    assert num_refused == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "pack", [zip_of, tar_of, lambda files: tar_of(files, "w")], ids=["zip", "tar.gz", "tar"]
)
def test_archive_gives_all_its_skills(pack):
    files = {"repo-1/saw/SKILL.md": SKILL, "repo-1/a/drill/skill.md": skill_md("drill")}

    texts = collect_registry.read_skill_files(pack({"repo-1/README.md": b"x"} | files))

    assert texts == {"saw": SKILL.decode(), "a/drill": skill_md("drill").decode()}


def lzma_zip():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("SKILL.md", SKILL)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zip_of({"SKILL.md": SKILL, "../../evil": b""}), r"holds the path '\.\./\.\./evil'"),
        (tar_of({"SKILL.md": SKILL, "/etc/evil": b""}), "holds the path '/etc/evil'"),
        (zip_of({"SKILL.md": SKILL, "C:evil": b""}), "holds the path 'C:evil'"),
        (zip_of({"SKILL.md": SKILL, "zeros": bytes(200_000)}), "100,000 bytes"),
        (tar_of({"SKILL.md": SKILL, "zeros": bytes(200_000)}), "more than 100,000 bytes"),
        (zip_of({f"file{number}": b"" for number in range(20)}), "more than 10 files"),
        (zip_of({"SKILL.md": SKILL * 1_000}), "no SKILL.md"),
        (zip_of({"README.md": b"x"}), "no SKILL.md"),
        (lzma_zip(), "compressed by method 14"),
        (zip_of({"SKILL.md": bytes(range(256)) * 20}), "binary"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b'{"error": "log in"}', "JSON"),
    ],
)
def test_hostile_archive_is_refused(monkeypatch, content, message):
    monkeypatch.setattr(collect_registry, "MAX_UNPACKED_BYTES", 100_000)
    monkeypatch.setattr(collect_registry, "MAX_SKILL_BYTES", 20_000)
    monkeypatch.setattr(collect_registry, "MAX_FILES", 10)

    with pytest.raises(ValueError, match=message):
        collect_registry.read_skill_files(content)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(bytes(200_000)), "more than 100,000 bytes"),
        (Reply(SKILL, headers={"Content-Encoding": "gzip"}), "compressed"),
        (Reply(status=404), "404"),
        (Reply(zip_of({"SKILL.md": SKILL})[:-30]), "BadZipFile"),
    ],
)
def test_bad_download_is_left_out(server, collect, capsys, monkeypatch, reply, message):
    monkeypatch.setattr(collect_registry, "MAX_BYTES", 100_000)
    server.skills = {"s": SKILL, "good": SKILL}
    server.script["/api/get/s"] = [reply]

    num_refused = collect()

    assert num_refused == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "body", [b"<html>Welcome", b"[]", b'{"items": [{"slug": "a"}]}', b"[" * 9999]
)
def test_listing_that_is_none_is_refused(server, collect, body):
    server.script["/api/skills?page=1"] = [Reply(body)]

    with pytest.raises(SystemExit, match=r"skills\?page=1: cannot be read as a list of skills"):
        collect()
