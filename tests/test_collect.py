"""The collector against a real server on loopback: polite, bounded, resumable, never led astray."""

import functools
import gzip
import json
import os
import random
import ssl
import subprocess
import sys
import tempfile
import threading
from email.utils import formatdate
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from registry_server import Entry, Reply, digest_of, registry_server, skill_md, tar_of, zip_of
from skilltrain.config import validate
from skilltrain.data.collect.collect import CollectConfig, run_collect
from skilltrain.data.collect.sync_state import DATABASE, open_state
from skilltrain.errors import SkilltrainError
from skilltrain.tables import DROPPED, SKILLS, read_table

CLIENT = "skilltrain.data.collect.registry_client"
CURSOR = {"param": "cursor", "cursor": "next_cursor"}
SEVEN = {f"s{number}": zip_of({"SKILL.md": skill_md(f"skill {number}")}) for number in range(7)}
one_ssl_context = functools.cache(ssl.create_default_context)


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    """Loopback is reached directly wherever the tests run, and certificates are loaded once."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(ssl, "create_default_context", one_ssl_context)
    for name, value in (("MIN_BACKOFF", 0), ("MAX_BACKOFF", 0), ("TIMEOUT", 10)):
        monkeypatch.setattr(f"{CLIENT}.{name}", value)


@pytest.fixture
def registry():
    with registry_server() as server:
        server.skills = {skill_id: Entry(content) for skill_id, content in SEVEN.items()}
        yield server


class Synced(NamedTuple):
    """What one run came to: its counts, and by skill_id the names of skills, the filters and reasons of others."""

    summary: dict
    names: dict
    dropped: dict
    reasons: dict


@pytest.fixture
def sync(registry, tmp_path):
    """Settings → one run, whose requests alone are in the registry's log; those of sections have their name before."""

    def run(**changes):
        values = {"state": tmp_path / "state", "out": tmp_path / "out"}
        values |= {name: value for name, value in changes.items() if "__" not in name}
        of_registry = {"base_url": registry.base_url, "requests_per_second": 1e6}
        of_registry |= {
            name[10:]: value for name, value in changes.items() if name.startswith("registry__")
        }
        registry.log.clear()
        folder = Path(tempfile.mkdtemp(prefix="out", dir=tmp_path))
        summary = run_collect(
            validate(CollectConfig, {**values, "registry": of_registry}, "test"), folder
        )
        skills, dropped = (read_table(folder, spec).to_pylist() for spec in (SKILLS, DROPPED))
        assert all(row["reason"] and "\n" not in row["reason"] for row in dropped)
        columns = ((skills, "name"), (dropped, "filter"), (dropped, "reason"))
        return Synced(
            summary, *({row["skill_id"]: row[name] for row in rows} for rows, name in columns)
        )

    return run


@pytest.fixture
def failure(sync):
    """Settings → what is said of a run that fails."""

    def run(**changes):
        with pytest.raises(SkilltrainError) as caught:
            sync(**changes)
        return str(caught.value)

    return run


class FakeTime:
    """A clock that only sleeping moves, in place of the client's; each look at it moves it by `tick`."""

    def __init__(self):
        self.seconds, self.slept, self.tick = 1000.0, [], 0.0

    def monotonic(self):
        self.seconds += self.tick
        return self.seconds

    time = monotonic

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.seconds += seconds


@pytest.fixture
def time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(f"{CLIENT}.time", fake)
    return fake


# What is listed and what is in it ------------------------------------------------------------------------------------


def test_every_listed_skill_is_collected_and_a_second_run_asks_only_for_what_is_new_or_changed(
    registry, sync
):
    registry.skills["gone"] = Entry(b"", url="get/nowhere")
    first = sync()
    assert first.names == {f"s{number}": f"skill {number}" for number in range(7)}
    assert (first.dropped, first.reasons) == ({"gone": "gone"}, {"gone": "HTTP 404"})
    # pages of 3 + 3 + 2 and an empty one, then each skill once
    assert registry.paths[:4] == [f"/api/skills?page={page}" for page in (1, 2, 3, 4)]
    assert registry.downloads() == ["nowhere", *first.names]
    assert first.summary == {
        "num_listed": 8,
        "num_fetched": 7,
        "num_requests": 12,
        "num_skills": 7,
        "num_dropped": {"gone": 1},
    }
    registry.skills["s2"] = Entry(skill_md("two, changed"), updated="2026-02-02")
    registry.skills["new"] = Entry(skill_md("new"))
    del registry.skills["s5"]
    second = sync()
    assert registry.downloads() == ["new", "s2"] and second.summary["num_fetched"] == 2
    assert second.names["s2"] == "two, changed" and "s5" not in second.names
    assert (
        second.dropped == {"gone": "gone", "s5": "unlisted"}
        and second.reasons["gone"] == "HTTP 404"
    )


def test_keys_nested_lists_at_the_root_and_a_template_of_the_download(registry, sync, tmp_path):
    page = {"data": {"list": [{"slug": "own er/ns", "meta": {"v": 3}}, {"slug": ".."}]}}
    registry.script["/api/skills?offset=0"] = [Reply(json.dumps(page).encode())]
    registry.script["/api/skills?offset=50"] = [Reply(b'{"data": {"list": []}}')]
    registry.script["/api/get/own%20er%2Fns"] = [Reply(b"# no header\nA body.")]
    found = sync(
        registry__download="get/{slug}",
        registry__pages={"param": "offset", "first": 0, "step": 50},
        registry__keys={"items": "data.list", "id": "slug", "updated": "meta.v"},
    )
    assert (found.names, found.dropped) == ({"own er/ns": "ns"}, {"..": "no_url"})
    assert registry.paths == [
        "/api/skills?offset=0",
        "/api/skills?offset=50",
        "/api/get/own%20er%2Fns",
    ]
    registry.script["/api/skills?page=1"] = [
        Reply(json.dumps([{"id": 5, "download_url": "get/s1"}]).encode())
    ]
    registry.script["/api/skills?page=2"] = [Reply(b"[]")]
    assert list(sync(registry__keys={"items": ""}, state=tmp_path / "s2").names) == ["5"]


def test_several_skills_in_one_archive_have_their_paths_behind_the_id(registry, sync):
    repository = {f"repo-1/skills/{name}/SKILL.md": skill_md(name) for name in ("saw", "drill")}
    registry.skills = {
        "owner/repo": Entry(zip_of(repository | {"repo-1/README.md": b"x"})),
        "owner/repo/skills/saw": Entry(skill_md("the real saw")),
        "one": Entry(tar_of({"deep/er/SKILL.md": skill_md("deep"), "deep/x": b""})),
    }
    found = sync()
    assert found.names == {
        "one": "deep",
        "owner/repo/skills/drill": "drill",
        "owner/repo/skills/saw": "the real saw",
        "owner/repo/skills/saw~2": "saw",
    }
    assert not found.dropped


def test_hostile_archives_and_entries_are_dropped_with_a_reason_and_touch_nothing(
    registry, sync, tmp_path
):
    registry.skills = {
        "../../evil": Entry(b"", url="get/fine"),
        "zip-slip": Entry(zip_of({"SKILL.md": b"x", "../../../evil": b"x"})),
        "no-skill": Entry(zip_of({"README.md": b"x"})),
        "no-text": Entry(zip_of({"SKILL.md": bytes(range(256)) * 20})),
        "bad\nid": Entry(b"x"),
        "x" * 600: Entry(b"x"),
        "fine": Entry(SEVEN["s0"]),
    }
    found = sync()
    assert set(found.names) == {"fine", "../../evil"}
    assert found.dropped == {
        "zip-slip": "unsafe_name",
        "no-skill": "no_skill_file",
        "no-text": "not_text",
        "": "no_id",
    }
    out, state = sorted(tmp_path.iterdir())
    assert state.name == "state" and {path.name for path in out.iterdir()} == {
        "skills.parquet",
        "dropped.parquet",
    }


def test_an_id_that_comes_twice_is_one_skill_and_its_later_entry_counts(registry, sync):
    body = json.dumps(
        {
            "items": [
                {"id": "s0", "download_url": "get/s0", "updated_at": "old"},
                {"id": "s6", "download_url": "get/s1"},
            ]
        }
    ).encode()
    registry.script["/api/skills?page=1"] = [Reply(body)]
    registry.before = lambda path: (
        registry.reply("/api/skills?page=1", {}) if path.endswith("page=2") else None
    )
    found = sync()
    assert sorted(found.names) == registry.downloads() == ["s0", "s1", "s2", "s6"]
    assert found.dropped == {"s6": "same_id"}  # its two entries led to different downloads


def test_a_first_page_that_is_none_and_pages_that_repeat_themselves_are_one_clear_line(
    registry, failure, monkeypatch
):
    monkeypatch.setattr(f"{CLIENT}.MAX_BYTES", 150_000)
    for reply, message in (
        (Reply(b"<html>Welcome"), "the answer is an HTML page (tried 3 times)"),
        (Reply(b'{"items": [{"id": 1'), "the answer is no JSON"),
        (Reply(b"[" * 100_000), "the answer is no JSON"),
        (Reply(b'{"skills": []}'), "no list under 'items'; it is an object with the keys skills"),
        (Reply(b'{"items": []}'), "lists no skill"),
        (Reply(b'{"items": [{"slug": "a"}, 7]}'), "has no usable id among its keys slug"),
        (Reply(b'{"items": [{"id": "a"}]}'), "has no usable download_url among its keys id"),
        (Reply(b"", 401), "set token_env"),
        (Reply(b"", 404), "HTTP 404 (check registry.base_url and listing)"),
        (Reply(b"", 502), "HTTP 502 (tried 3 times)"),
        (Reply(b"x" * 200_000), "has more than 150,000 bytes"),
        (Reply(b"", 302, {"Location": "http://evil.example/"}), "not in allow_hosts"),
    ):
        registry.before = lambda path, reply=reply: reply
        assert message in failure()
        assert not registry.downloads()
    page = Reply(
        json.dumps({"items": [{"id": "s0", "download_url": "x"}], "next_cursor": "0"}).encode()
    )
    registry.before = lambda path: page
    message = "the last 3 pages list nothing new: the listing repeats itself"
    for settings, num_pages in (({}, 4), ({"registry__pages": CURSOR}, 2)):
        assert message in failure(**settings) and len(registry.paths) == num_pages
        assert message in failure(**settings)  # of kept pages


# What the server answers ---------------------------------------------------------------------------------------------

WHOLE = zip_of({"SKILL.md": skill_md("one")})
ZIPPED = {"Content-Encoding": "gzip"}
BIG = "has more than 100,000 bytes"
# replies in place of the usual one; filter and reason of what is left out; times asked; whether the next run asks again
ANSWERS = [
    ([Reply(b"", 503)] * 3, "failed", "HTTP 503 (tried 3 times)", 3, True),
    ([Reply(b"", 500)] * 2, None, "", 3, False),
    ([Reply(b"", 403)], "forbidden", "HTTP 403", 1, True),
    ([Reply(b"", 404)], "gone", "HTTP 404", 1, False),
    ([Reply(b"x" * 3_000_000, length=-1)], "too_big", BIG, 1, False),
    ([Reply(b"x", length=10**12)], "too_big", BIG, 1, False),
    ([Reply(gzip.compress(bytes(30_000_000), 1), headers=ZIPPED)], "too_big", BIG, 1, False),
    ([Reply(WHOLE, cut=20)], None, "", 2, False),
    ([Reply(WHOLE[:-9], length=-1)], None, "", 2, False),  # its digest tells
    ([Reply(WHOLE + b"x")] * 3, "failed", "is not what the listing says (tried 3 times)", 3, True),
    ([Reply(gzip.compress(WHOLE), headers=ZIPPED)], None, "", 1, False),
    (
        [Reply(WHOLE, headers={"Content-Encoding": "br"})],
        "failed",
        "'br' was not asked for",
        1,
        True,
    ),
    ([Reply(b"<!doctype html><html>Log in")], None, "", 2, False),
    (
        [Reply(b'{"error": "slow down"}')] * 3,
        "failed",
        "is not what the listing says (tried 3 times)",
        3,
        True,
    ),
    ([Reply(b"", 301, {"Location": "/api/moved/s14"})], None, "", 1, False),
    (
        [Reply(b"", 302, {"Location": "http://169.254.169.254/"})],
        "host_not_allowed",
        "not in allow_hosts",
        1,
        True,
    ),
    (
        [Reply(b"", 302, {"Location": "file:///etc/passwd"})],
        "host_not_allowed",
        "not in allow_hosts",
        1,
        True,
    ),
    (
        [Reply(b"", 307, {"Location": "/api/get/s17"})] * 6,
        "failed",
        "more than 5 redirects",
        6,
        True,
    ),
    ([Reply(b"", 302)], "failed", "HTTP 302", 1, True),
]


def test_what_the_server_answers_decides_what_is_kept_and_asked_again(registry, sync, monkeypatch):
    monkeypatch.setattr(
        "skilltrain.data.collect.collect.MAX_FAILURES_IN_ROW", 3
    )  # but those here are not in a row
    monkeypatch.setattr(f"{CLIENT}.MAX_BYTES", 100_000)
    answers = {f"s{number}": answer for number, answer in enumerate(ANSWERS)}
    registry.skills = {skill_id: Entry(WHOLE, digest=digest_of(WHOLE)) for skill_id in answers}
    registry.script |= {
        f"/api/get/{skill_id}": list(replies) for skill_id, (replies, *_) in answers.items()
    }
    found = sync()
    assert found.dropped == {
        skill_id: answer[1] for skill_id, answer in answers.items() if answer[1]
    }
    assert found.names.keys() == answers.keys() - found.dropped.keys()
    assert all(
        answer[2] in found.reasons[skill_id] for skill_id, answer in answers.items() if answer[1]
    )
    asked = registry.downloads()
    assert {skill_id: asked.count(skill_id) for skill_id in answers} == {
        one: row[3] for one, row in answers.items()
    }
    kept = {
        skill_id: word for skill_id, word in found.dropped.items() if word in ("gone", "too_big")
    }
    assert sync().dropped == kept
    assert set(registry.downloads()) == {
        skill_id for skill_id, answer in answers.items() if answer[4]
    }
    for skill_id in kept:
        registry.skills[skill_id].updated = "2027"  # another version
    assert not sync().dropped
    assert set(registry.downloads()) == kept.keys()


def test_an_archive_that_came_broken_is_asked_for_again_in_full_and_a_failed_update_keeps_the_old(
    registry, sync
):
    registry.skills["s1"].etag = '"1"'
    registry.script["/api/get/s1"] = [
        Reply(registry.skills["s1"].body[:-30], length=-1, headers={"ETag": '"1"'})
    ] * 3
    found = sync()
    assert found.dropped == {"s1": "failed"} and "cannot be unpacked" in found.reasons["s1"]
    assert sync().names["s1"] == "skill 1" and registry.downloads() == ["s1"]
    registry.skills["s1"].updated = "2027"
    registry.script["/api/get/s1"] = [Reply(b"", 500)] * 3
    found = sync()
    assert found.names["s1"] == "skill 1" and "the version of before is kept" in found.reasons["s1"]
    registry.skills["s1"] = Entry(skill_md("fresh"), updated="2027")
    assert sync().names["s1"] == "fresh"


def test_what_the_listing_cannot_tell_is_asked_for_with_the_etag(registry, sync):
    for number, entry in enumerate(registry.skills.values()):
        entry.updated, entry.etag = "", f'"{number}"'
    sync()
    registry.skills["s4"].body, registry.skills["s4"].etag = skill_md("four, changed"), '"new"'
    found = sync()
    assert (found.summary["num_fetched"], len(registry.downloads())) == (1, 7)
    assert found.names["s4"] == "four, changed" and found.names["s1"] == "skill 1"
    assert [headers.get("if-none-match") for path, headers in registry.log if "get/s1" in path] == [
        '"1"'
    ]
    registry.skills = {"s4": Entry(skill_md("two"), etag='"new"', updated="2", url="get/s4?v=2")}
    assert sync().names["s4"] == "two"  # an ETag of another URL says nothing


def test_the_run_stops_when_it_is_the_registry_that_fails_and_goes_on_later(
    registry, sync, failure, monkeypatch
):
    registry.before = lambda path: (
        Reply(b"", 500 if "s0" not in path else 403) if "/get/" in path else None
    )
    monkeypatch.setattr(
        "skilltrain.data.collect.collect.MAX_FAILURES_IN_ROW", 4
    )  # 403 says nothing of the registry
    assert "4 skills in a row could not be fetched; the last: HTTP 500" in failure()
    assert len(registry.downloads()) == 13
    registry.before = lambda path: None
    registry.script["/api/get/s3"] = [Reply(b"", 429, {"Retry-After": "7200"})]
    assert "asks to wait 7,200 seconds (HTTP 429)" in failure()
    assert len(sync().names) == 7
    assert registry.paths == [
        f"/api/get/s{number}" for number in (3, 4, 5, 6)
    ]  # the listing was there already


def test_other_hosts_private_addresses_and_other_schemes_are_refused_without_a_request(
    registry, sync, failure
):
    host = registry.base_url.removeprefix("http://").removesuffix("/api")
    urls = [
        "http://169.254.169.254/latest/meta-data",
        "http://localhost:1/x",
        "http://127.0.0.1:1/x",
        "file:///etc/passwd",
        "http://[::1]/x",
        f"http://user:pw@{host}/x",
        f"http://{host}@evil.example/x",
        "ftp://evil.example/x",
        "//evil.example/x",
        "http://2130706433/x",
        "https://evil.example/x",
        "http://[",
        "javascript:alert(1)",
        "http://evil.example:99999999/x",
    ]
    registry.skills |= {f"bad{number}": Entry(b"x", url=url) for number, url in enumerate(urls)}
    found = sync()
    assert found.dropped.keys() == {f"bad{number}" for number in range(len(urls))}
    assert set(found.dropped.values()) <= {"host_not_allowed", "no_url"}
    assert len(found.names) == 7
    assert not any(path.rpartition("/")[2] == "x" for path in registry.paths)
    assert "169.254.169.254:80 is not the registry and not in allow_hosts" in found.reasons["bad0"]
    registry.skills = {"a": Entry(b"x", url="http://evil.example/x")}
    reason = "no skill is left of 1 listed (the first of 8 dropped rows: http://evil.example:80 is not the registry"
    assert reason in failure()


def test_the_token_goes_to_the_registry_alone_and_is_never_written(
    registry, sync, tmp_path, monkeypatch
):
    monkeypatch.setenv("REGISTRY_TOKEN", "s3cret-token")
    with registry_server() as elsewhere:
        host = elsewhere.base_url.removeprefix("http://").removesuffix("/api")
        elsewhere.script["/x"] = [Reply(skill_md("from elsewhere"))] * 2
        registry.script["/api/get/s1"] = [Reply(b"", 302, {"Location": f"http://{host}/x"})]
        registry.skills["s2"].url = f"http://{host}/x"
        settings = {"registry__token_env": "REGISTRY_TOKEN", "registry__allow_hosts": [host]}
        names = sync(**settings).names
        assert names["s1"] == names["s2"] == "from elsewhere"
        assert ["authorization" in headers for _, headers in elsewhere.log] == [False, False]
    assert all(headers["authorization"] == "Bearer s3cret-token" for _, headers in registry.log)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"s3cret" in content for content in written)


def test_wrong_settings_are_refused_and_no_secret_is_shown(failure, tmp_path, monkeypatch):
    monkeypatch.setenv("TWO_LINES", "line\npw")
    for key, value, message in (
        ("base_url", "ftp://h/x", "give a URL such as https://"),
        ("base_url", "http://user:pw@h/x", "without user, password or query"),
        ("base_url", "http://h/?key=pw", "without user, password or query"),
        ("token_env", "sk-pw", "give the name of an environment variable"),
        ("token_env", "NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE holds no token"),
        ("token_env", "TWO_LINES", "TWO_LINES holds no token"),
        ("allow_hosts", ["*.example.org"], "give a host or host:port"),
        ("allow_hosts", ["http://h/"], "give a host or host:port"),
    ):
        said = failure(**{f"registry__{key}": value})
        assert message in said and "pw" not in said
    assert "state must not lie in out" in failure(state=tmp_path / "out" / "state")


# Pace, and going on --------------------------------------------------------------------------------------------------


def test_requests_keep_the_pace_through_retries_and_redirects(
    registry, sync, tmp_path, time, monkeypatch
):
    at = []
    registry.before = lambda path: at.append(time.seconds)
    registry.script["/api/skills?page=2"] = [Reply(b"", 500)] * 2
    for name, value in (("MIN_BACKOFF", 1), ("MAX_BACKOFF", 10)):
        monkeypatch.setattr(f"{CLIENT}.{name}", value)
    found = sync(registry__requests_per_second=1)
    assert found.summary["num_requests"] == len(registry.log) == 13
    # 13 requests: 12 gaps of a second, but the back-off of 2 seconds before the third try is one second longer
    assert time.seconds - 1000 == pytest.approx(13)
    assert min(later - earlier for earlier, later in pairwise(at)) >= 1 - 1e-9
    registry.script["/api/get/s0"] = [Reply(b"", 500)] * 6
    time.slept.clear()
    monkeypatch.setattr(f"{CLIENT}.ATTEMPTS", 6)
    sync(state=tmp_path / "s")
    assert [seconds for seconds in time.slept if seconds > 0.5] == pytest.approx(
        [1, 2, 4, 8, 10], abs=1e-4
    )


def test_retry_after_is_honoured(registry, sync, time):
    at = {}
    registry.before = lambda path: at.setdefault(path, time.seconds) and None
    given = [
        (429, "33"),
        (503, "0"),
        (403, "60"),
        (429, formatdate(1170, usegmt=True)),
        (429, "soon"),
    ]
    for number, (status, seconds) in enumerate(given):
        registry.script[f"/api/get/s{number}"] = [Reply(b"", status, {"Retry-After": seconds})]
    sync()
    # `before` hears of a path when its script is done; 33 + 60 seconds have passed when the date is given
    begin = at["/api/skills?page=1"]
    passed = [at[f"/api/get/s{number}"] - begin for number in range(len(given))]
    assert passed == pytest.approx([33, 33, 93, 170, 170], abs=1e-3)


def test_a_steady_drip_is_cut_off(registry, sync, time):
    time.tick = 100.0
    registry.skills = {
        "s0": Entry(random.Random(0).randbytes(3_000_000)),
        "s1": registry.skills["s1"],
    }
    found = sync()
    assert found.dropped == {"s0": "failed"} and "longer than 600 seconds" in found.reasons["s0"]


def test_the_end_may_be_a_404_and_a_trial_may_stop_early(registry, sync, tmp_path):
    registry.script["/api/skills?page=4"] = [Reply(b"", 404)]
    assert len(sync().names) == 7
    found = sync(registry__max_skills=4, state=tmp_path / "trial")
    assert list(found.names) == ["s0", "s1", "s2", "s3"] and len(registry.paths) == 2 + 4


def test_a_listing_goes_on_at_the_page_that_failed_and_anew_for_a_forgotten_cursor(
    registry, sync, failure, tmp_path
):
    registry.script["/api/skills?page=3"] = [Reply(b"", 500)] * 3
    assert "HTTP 500 (tried 3 times) (the pages before are kept: run again)" in failure()
    found = sync(registry__keys={"digest": "sha256"})  # kept pages are read with other keys too
    assert len(found.names) == 7 and registry.paths[0] == "/api/skills?page=3"
    settings = {
        "registry__pages": CURSOR,
        "registry__params": {"limit": "3"},
        "state": tmp_path / "s2",
    }
    pages = ["/api/skills?limit=3", *(f"/api/skills?limit=3&cursor={n}" for n in (3, 6))]
    registry.script[pages[2]] = [Reply(b"", 500)] * 3 + [Reply(b"", 410)]
    assert "the pages before are kept: run again" in failure(**settings)
    assert "HTTP 410 (run again to read the listing anew)" in failure(**settings)
    assert registry.paths == pages[2:]
    assert len(sync(**settings).names) == 7
    assert registry.paths[:3] == pages


def test_a_killed_run_goes_on_where_it_was_and_asks_for_nothing_twice(registry, sync, tmp_path):
    """The command in a process of its own, killed with -9 while it waits for an answer."""
    reached, go_on = threading.Event(), threading.Event()

    def hold(path):
        if path == "/api/get/s4":
            reached.set()
            go_on.wait(60)

    registry.before = hold
    settings = (
        f"registry.base_url={registry.base_url}",
        "registry.requests_per_second=1e6",
        f"state={tmp_path}/state",
    )
    command = [sys.executable, "-m", "skilltrain", "collect", *settings, f"out={tmp_path}/killed"]
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        assert reached.wait(120), process.communicate()[1]
        process.kill()
    go_on.set()
    registry.before = lambda path: None
    asked = list(registry.paths)
    assert asked[-1] == "/api/get/s4"
    found = sync()  # clears the log
    assert len(found.names) == 7 and not found.dropped
    # the request that was under way is made again; no other
    assert asked + registry.paths[1:] == [
        *(f"/api/skills?page={n}" for n in (1, 2, 3, 4)),
        *(f"/api/get/s{n}" for n in range(7)),
    ]
    assert registry.paths[0] == asked[-1]


def test_a_database_that_is_none_another_registry_and_another_collector_are_refused(
    registry, sync, failure, tmp_path
):
    sync()
    message = failure(registry__base_url="http://localhost:1")
    assert "holds what was collected from http://127" in message
    with open_state(tmp_path / "state", registry.base_url):
        assert "another process is writing" in failure()
    for file in (tmp_path / "state").glob(f"{DATABASE}*"):
        file.unlink()
    (tmp_path / "state" / DATABASE).write_text("not a database")
    assert "cannot be read or written as the state of a collector" in failure()
    assert "cannot write" in failure(state=tmp_path / "state" / DATABASE / "state")
