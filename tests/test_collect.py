"""The collector against a real server on loopback: polite, bounded, resumable, never led astray."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
from email.utils import formatdate
from itertools import pairwise

import pytest

from registry_server import Entry, Reply, digest_of, registry_server, skill_md, tar_of, zip_of
from skilltrain.config import validate
from skilltrain.data.collect.collect import CollectConfig, run_collect
from skilltrain.data.collect.sync_state import DATABASE, open_state
from skilltrain.data.pool.skill_pool import PoolConfig, run_pool
from skilltrain.errors import SkilltrainError
from skilltrain.tables import DROPPED, SKILLS, read_table

CURSOR = {"param": "cursor", "cursor": "next_cursor"}
FAST = {"requests_per_second": 1e6, "min_backoff": 0, "max_backoff": 0, "timeout": 10}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """Loopback is reached directly wherever the tests run."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def registry():
    with registry_server() as server:
        server.skills = {f"s{number}": Entry(zip_of({"SKILL.md": skill_md(f"skill {number}")})) for number in range(7)}
        yield server


def config_for(registry, root, **changes):
    """Settings; `registry__x` and `http__x` change a key of these sections."""
    sections = {"registry": {"base_url": registry.base_url}, "http": dict(FAST)}
    for key in list(changes):
        section, found, name = key.partition("__")
        if found:
            sections[section][name] = changes.pop(key)
    values = {"stage": "collect", "state": root / "state", "out": root / "out", **sections, **changes}
    return validate(CollectConfig, values, "test")


def sync(registry, root, out="out", **changes):
    """(summary, skill_id → row of SKILLS, {(skill_id, filter)} of DROPPED, rows of DROPPED) of one run."""
    registry.log.clear()
    folder = root / out
    folder.mkdir()
    summary = run_collect(config_for(registry, root, **changes), folder)
    dropped = read_table(folder, DROPPED).to_pylist()
    skills = {row["skill_id"]: row for row in read_table(folder, SKILLS).to_pylist()}
    return summary, skills, {(row["skill_id"], row["filter"]) for row in dropped}, dropped


def failure(registry, root, **changes):
    with pytest.raises(SkilltrainError) as caught:
        sync(registry, root, out=f"out{random.random()}", **changes)
    return str(caught.value)


class FakeTime:
    """A clock that only sleeping moves, in place of the client's; each look at it moves it by `tick`."""

    def __init__(self):
        self.seconds, self.slept, self.tick = 1000.0, [], 0.0

    def monotonic(self):
        self.seconds += self.tick
        return self.seconds

    def time(self):
        return self.seconds

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.seconds += seconds


@pytest.fixture
def time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr("skilltrain.data.collect.registry_client.time", fake)
    return fake


def test_every_listed_skill_is_collected_and_the_pool_reads_it(registry, tmp_path):
    summary, skills, dropped, _ = sync(registry, tmp_path)
    assert list(skills) == [f"s{number}" for number in range(7)]
    assert skills["s3"]["name"] == "skill 3"
    assert skills["s3"]["source"] == "127.0.0.1"
    assert not dropped
    # pages of 3 + 3 + 1 and an empty one, then each skill once
    assert registry.paths[:4] == [f"/api/skills?page={page}" for page in (1, 2, 3, 4)]
    assert registry.downloads() == list(skills)
    assert summary == {
        "num_listed": 7, "num_fetched": 7, "num_requests": 11, "num_skills": 7, "num_dropped": {},
    }  # fmt: skip
    (tmp_path / "pool").mkdir()
    found = run_pool(PoolConfig(sources=[tmp_path / "out"], out=tmp_path / "pool"), tmp_path / "pool")
    assert found["num_skills"] == 7
    assert set(read_table(tmp_path / "pool", SKILLS)["skill_id"].to_pylist()) == set(skills)


def test_pages_with_a_cursor_are_read_to_their_end(registry, tmp_path):
    registry.style = "cursor"
    _, skills, _, _ = sync(registry, tmp_path, registry__pages=CURSOR, registry__params={"limit": "3"})
    assert len(skills) == 7
    assert registry.paths[:3] == ["/api/skills?limit=3", *(f"/api/skills?limit=3&cursor={n}" for n in (3, 6))]


def test_keys_nested_lists_at_the_root_and_a_template_of_the_download(registry, tmp_path):
    page = {"data": {"list": [{"slug": "own er/ns", "meta": {"v": 3, "title": "T"}}]}}
    registry.script["/api/skills?offset=0"] = [Reply(json.dumps(page).encode())]
    registry.script["/api/skills?offset=50"] = [Reply(b'{"data": {"list": []}}')]
    registry.script["/api/get/own%20er%2Fns"] = [Reply(b"# no header\nA body.")]
    _, skills, _, _ = sync(
        registry, tmp_path, registry__download="get/{slug}",
        registry__pages={"param": "offset", "first": 0, "step": 50},
        registry__keys={"items": "data.list", "id": "slug", "updated": "meta.v", "name": "meta.title"},
    )  # fmt: skip
    assert skills["own er/ns"]["name"] == "T"
    assert registry.paths == ["/api/skills?offset=0", "/api/skills?offset=50", "/api/get/own%20er%2Fns"]
    listed = [{"id": 5, "download_url": "get/s1"}]
    registry.script["/api/skills?page=1"] = [Reply(json.dumps(listed).encode())]
    registry.script["/api/skills?page=2"] = [Reply(b"[]")]
    assert list(sync(registry, tmp_path, "b", registry__keys={"items": ""}, state=tmp_path / "s2")[1]) == ["5"]


def test_several_skills_in_one_archive_have_their_paths_behind_the_id(registry, tmp_path):
    repository = {f"repo-1/skills/{name}/SKILL.md": skill_md(name) for name in ("saw", "drill")}
    registry.skills = {
        "owner/repo": Entry(zip_of(repository | {"repo-1/README.md": b"x"})),
        "owner/repo/skills/saw": Entry(skill_md("the real saw")),
        "one": Entry(tar_of({"deep/er/SKILL.md": skill_md("deep"), "deep/x": b""})),
    }
    registry.skills["owner/repo"].url, registry.skills["owner/repo/skills/saw"].url = "get/a", "get/b"
    registry.script["/api/get/a"] = [Reply(registry.skills["owner/repo"].body)]
    registry.script["/api/get/b"] = [Reply(registry.skills["owner/repo/skills/saw"].body)]
    _, skills, dropped, _ = sync(registry, tmp_path)
    assert {skill_id: row["name"] for skill_id, row in skills.items()} == {
        "one": "deep", "owner/repo/skills/drill": "drill", "owner/repo/skills/saw": "the real saw",
        "owner/repo/skills/saw~2": "saw",
    }  # fmt: skip
    assert not dropped


def test_hostile_archives_and_entries_are_dropped_with_a_reason_and_touch_nothing(registry, tmp_path):
    good = registry.skills.pop("s0")
    registry.skills = {
        "../../evil": good,
        "zip-slip": Entry(zip_of({"SKILL.md": b"x", "../../../evil": b"x"})),
        "no-skill": Entry(zip_of({"README.md": b"x"})),
        "bad\nid": Entry(b"x"),
        "x" * 600: Entry(b"x"),
        "fine": Entry(good.body),
    }
    registry.skills["../../evil"].url = "get/fine"
    _, skills, dropped, rows = sync(registry, tmp_path)
    assert set(skills) == {"fine", "../../evil"}
    assert dropped == {("zip-slip", "unsafe_name"), ("no-skill", "no_skill_file"), ("", "no_id")}
    assert all(row["reason"] and "\n" not in row["reason"] for row in rows)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "state"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"skills.parquet", "dropped.parquet"}


def test_a_second_run_asks_only_for_what_is_new_or_changed(registry, tmp_path):
    registry.skills["gone"] = Entry(b"", url="get/nowhere")
    _, _, dropped, _ = sync(registry, tmp_path)
    assert dropped == {("gone", "gone")}
    registry.skills["s2"] = Entry(skill_md("two, changed"), updated="2026-02-02")
    registry.skills["new"] = Entry(skill_md("new"))
    del registry.skills["s5"]
    summary, skills, dropped, rows = sync(registry, tmp_path, "b")
    assert sorted(registry.downloads()) == ["new", "s2"]
    assert skills["s2"]["name"] == "two, changed"
    assert "s5" not in skills
    assert dropped == {("gone", "gone"), ("s5", "unlisted")}
    assert {row["reason"] for row in rows if row["skill_id"] == "gone"} == {"HTTP 404"}
    assert summary["num_fetched"] == 2


WHOLE = zip_of({"SKILL.md": skill_md("one")})
ZIPPED = {"Content-Encoding": "gzip"}


@pytest.mark.parametrize(
    ("replies", "left_out", "reason", "times", "again"),
    [
        ([Reply(b"", 503)] * 3, "failed", "HTTP 503 (tried 3 times)", 3, 1),
        ([Reply(b"", 500)] * 2, "", "", 3, 0),
        ([Reply(b"", 403)], "forbidden", "HTTP 403", 1, 1),
        ([Reply(b"", 404)], "gone", "HTTP 404", 1, 0),
        ([Reply(b"x" * 3_000_000, length=-1)], "too_big", "has more than 100,000 bytes", 1, 0),
        ([Reply(b"x", length=10**12)], "too_big", "has more than 100,000 bytes", 1, 0),
        ([Reply(gzip.compress(bytes(30_000_000)), headers=ZIPPED)], "too_big", "has more than 100,000 bytes", 1, 0),
        ([Reply(WHOLE, cut=20)], "", "", 2, 0),
        ([Reply(WHOLE[:-9], length=-1)], "", "", 2, 0),  # its digest tells
        ([Reply(WHOLE + b"x")] * 3, "failed", "is not what the listing says (tried 3 times)", 3, 1),
        ([Reply(gzip.compress(WHOLE), headers=ZIPPED)], "", "", 1, 0),
        ([Reply(WHOLE, headers={"Content-Encoding": "br"})], "failed", "'br' was not asked for", 1, 1),
        ([Reply(b"<!doctype html><html>Log in")], "", "", 2, 0),
        ([Reply(b'{"error": "slow down"}')] * 3, "failed", "the answer is a JSON object (tried 3 times)", 3, 1),
        ([Reply(b"", 301, {"Location": "/api/moved/s1"})], "", "", 1, 0),
        ([Reply(b"", 302, {"Location": "http://169.254.169.254/"})], "host_not_allowed", "not in allow_hosts", 1, 1),
        ([Reply(b"", 302, {"Location": "file:///etc/passwd"})], "host_not_allowed", "only http and https", 1, 1),
        ([Reply(b"", 307, {"Location": "/api/get/s1"})] * 6, "failed", "more than 5 redirects", 6, 1),
        ([Reply(b"", 302)], "failed", "HTTP 302", 1, 1),
    ],
)
def test_what_the_server_answers_decides_what_is_kept_and_asked_again(
    registry, tmp_path, replies, left_out, reason, times, again
):
    registry.skills = {"s0": registry.skills["s0"], "s1": Entry(WHOLE, digest=digest_of(WHOLE))}
    registry.script["/api/get/s1"] = list(replies)
    _, skills, dropped, rows = sync(registry, tmp_path, http__max_download_bytes=100_000)
    assert dropped == ({("s1", left_out)} if left_out else set()) and set(skills) == {"s0", "s1"} - {
        skill_id for skill_id, _ in dropped
    }
    assert all(reason in row["reason"] for row in rows) and registry.downloads().count("s1") == times
    assert sync(registry, tmp_path, "b", http__max_download_bytes=100_000)[2] == (dropped if not again else set())
    assert registry.downloads() == ["s1"] * again
    if left_out == "too_big":  # a larger limit, and it is asked for
        assert not sync(registry, tmp_path, "c")[2] and registry.downloads() == ["s1"]
    if left_out == "gone":  # another version, and it is asked for
        registry.skills["s1"].updated = "2027"
        assert not sync(registry, tmp_path, "d")[2] and registry.downloads() == ["s1"]


def test_an_archive_that_came_broken_is_asked_for_again_in_full(registry, tmp_path):
    registry.skills["s1"].etag = '"1"'
    registry.script["/api/get/s1"] = [Reply(registry.skills["s1"].body[:-30], length=-1, headers={"ETag": '"1"'})]
    assert sync(registry, tmp_path)[2] == {("s1", "broken_archive")}
    assert not sync(registry, tmp_path, "b")[2]
    assert registry.downloads() == ["s1"]


def test_a_skill_whose_new_version_cannot_be_had_keeps_the_old_one(registry, tmp_path):
    sync(registry, tmp_path)
    registry.skills["s1"].updated = "2027"
    registry.script["/api/get/s1"] = [Reply(b"", 500)] * 3
    _, skills, _, rows = sync(registry, tmp_path, "b")
    assert skills["s1"]["name"] == "skill 1"
    assert "the version of before is kept" in rows[0]["reason"]
    registry.skills["s1"].body = skill_md("fresh")
    assert sync(registry, tmp_path, "c")[1]["s1"]["name"] == "fresh"


def test_what_the_listing_cannot_tell_is_asked_for_with_the_etag(registry, tmp_path):
    for number, entry in enumerate(registry.skills.values()):
        entry.updated, entry.etag = "", f'"{number}"'
    sync(registry, tmp_path)
    registry.skills["s4"].body, registry.skills["s4"].etag = skill_md("four, changed"), '"new"'
    summary, skills, _, _ = sync(registry, tmp_path, "b")
    assert (summary["num_fetched"], len(registry.downloads())) == (1, 7)
    assert skills["s4"]["name"] == "four, changed"
    assert [asked.headers.get("if-none-match") for asked in registry.log if "get/s1" in asked.path] == ['"1"']
    registry.skills = {"s4": Entry(skill_md("two"), etag='"new"', updated="2", url="get/s4?v=2")}
    assert sync(registry, tmp_path, "c")[1]["s4"]["name"] == "two"  # an ETag of another URL says nothing


def test_the_run_stops_when_it_is_the_registry_that_fails(registry, tmp_path, monkeypatch):
    registry.before = lambda path: Reply(b"", 500 if "s0" not in path else 403) if "/get/" in path else None
    monkeypatch.setattr("skilltrain.data.collect.collect.MAX_FAILURES_IN_ROW", 4)  # 403 says nothing of the registry
    assert "4 skills in a row could not be fetched; the last: HTTP 500" in failure(registry, tmp_path)
    assert len(registry.downloads()) == 13
    registry.before = lambda path: None
    assert len(sync(registry, tmp_path)[1]) == 7
    assert not any("skills?" in path for path in registry.paths)  # the listing was there already


def test_other_hosts_private_addresses_and_other_schemes_are_refused_without_a_request(registry, tmp_path):
    host = registry.base_url.removeprefix("http://").removesuffix("/api")
    urls = [
        "http://169.254.169.254/latest/meta-data", "http://localhost:1/x", "http://127.0.0.1:1/x", "file:///etc/passwd",
        "http://[::1]/x", f"http://user:pw@{host}/x", f"http://{host}@evil.example/x", "ftp://evil.example/x",
        "//evil.example/x", "http://2130706433/x", "https://evil.example/x", "http://[", "javascript:alert(1)",
    ]  # fmt: skip
    for number, url in enumerate(urls):
        registry.skills[f"bad{number}"] = Entry(b"x", url=url)
    _, skills, dropped, rows = sync(registry, tmp_path)
    assert {skill_id for skill_id, _ in dropped} == {f"bad{number}" for number in range(len(urls))}
    assert {filter for _, filter in dropped} <= {"host_not_allowed", "no_url"}
    assert len(skills) == 7
    assert not any(path.rpartition("/")[2] == "x" for path in registry.paths)
    assert "169.254.169.254:80 is not the registry and not in allow_hosts" in str(rows)
    registry.skills = {"a": Entry(b"x", url="http://evil.example/x")}
    reason = "no skill is left of 1 listed (the first of 8 dropped rows: http://evil.example:80 is not the registry"
    assert reason in failure(registry, tmp_path)


def test_the_token_goes_to_the_registry_alone_and_is_never_written(registry, tmp_path, monkeypatch):
    monkeypatch.setenv("REGISTRY_TOKEN", "s3cret-token")
    with registry_server() as elsewhere:
        host = elsewhere.base_url.removeprefix("http://").removesuffix("/api")
        elsewhere.script["/x"] = [Reply(skill_md("from elsewhere"))] * 2
        registry.script["/api/get/s1"] = [Reply(b"", 302, {"Location": f"http://{host}/x"})]
        registry.skills["s2"].url = f"http://{host}/x"
        settings = {"registry__token_env": "REGISTRY_TOKEN", "registry__allow_hosts": [host]}
        _, skills, _, _ = sync(registry, tmp_path, **settings)
        assert skills["s1"]["name"] == skills["s2"]["name"] == "from elsewhere"
        assert len(elsewhere.log) == 2
        assert not any("authorization" in asked.headers for asked in elsewhere.log)
    assert all(asked.headers["authorization"] == "Bearer s3cret-token" for asked in registry.log)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"s3cret" in content for content in written)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"registry__base_url": "ftp://h/x"}, "give a URL such as https://"),
        ({"registry__base_url": "http://user:pw@h/x"}, "without user, password or query"),
        ({"registry__base_url": "http://h/?key=pw"}, "without user, password or query"),
        ({"registry__token_env": "sk-pw"}, "give the name of an environment variable"),
        ({"registry__token_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE holds no token"),
        ({"registry__allow_hosts": ["*.example.org"]}, "give a host or host:port"),
        ({"registry__allow_hosts": ["http://h/"]}, "give a host or host:port"),
        ({"registry__token_env": "TWO_LINES"}, "TWO_LINES holds no token"),
    ],
)
def test_wrong_settings_are_refused(registry, tmp_path, monkeypatch, changes, message):
    monkeypatch.setenv("TWO_LINES", "line\npw")
    said = failure(registry, tmp_path, **changes)
    assert message in said and "pw" not in said


@pytest.mark.parametrize("style", ["number", "cursor"])
def test_pages_that_go_in_a_circle_end_with_an_error(registry, tmp_path, style):
    registry.style = style
    page = Reply(json.dumps({"items": [{"id": "s0", "download_url": "x"}], "next_cursor": "0"}).encode())
    registry.before = lambda path: page if "skills" in path else None
    settings = {"registry__pages": CURSOR} if style == "cursor" else {}
    message = "the last 3 pages list nothing new: the listing repeats itself"
    assert message in failure(registry, tmp_path, **settings)
    assert len(registry.paths) == {"number": 4, "cursor": 2}[style]
    assert message in failure(registry, tmp_path, **settings)


def test_an_id_that_comes_twice_is_one_skill_and_its_later_entry_counts(registry, tmp_path):
    body = json.dumps({"items": [
        {"id": "s0", "download_url": "get/s0", "updated_at": "old"}, {"id": "s6", "download_url": "get/s1"},
    ]}).encode()  # fmt: skip
    registry.script["/api/skills?page=1"] = [Reply(body)]
    registry.before = lambda path: registry.reply("/api/skills?page=1", {}) if path.endswith("page=2") else None
    _, skills, dropped, _ = sync(registry, tmp_path)
    assert sorted(skills) == ["s0", "s1", "s2", "s6"]
    assert registry.downloads() == ["s0", "s1", "s2", "s6"]
    assert dropped == {("s6", "same_id")}  # its two entries led to different downloads


@pytest.mark.parametrize(
    ("reply", "message"),
    [
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
        (Reply(b"x" * 2000), "has more than 1,000 bytes"),
        (Reply(b"", 302, {"Location": "http://evil.example/"}), "name it in registry.allow_hosts"),
    ],
    ids=str,
)
def test_a_first_page_that_is_none_is_one_clear_line(registry, tmp_path, reply, message):
    registry.before = lambda path: reply
    settings = {"http__max_download_bytes": 1000} if len(reply.body) == 2000 else {}
    assert message in failure(registry, tmp_path, **settings)
    assert not registry.downloads()


def test_the_end_may_be_a_404_and_a_trial_may_stop_early(registry, tmp_path):
    registry.script["/api/skills?page=4"] = [Reply(b"", 404)]
    assert len(sync(registry, tmp_path)[1]) == 7
    settings = {"registry__max_skills": 4, "state": tmp_path / "trial"}
    assert list(sync(registry, tmp_path, "b", **settings)[1]) == ["s0", "s1", "s2", "s3"]
    assert len(registry.paths) == 2 + 4


def test_requests_keep_the_pace_through_retries_and_redirects(registry, tmp_path, time):
    at = []
    registry.before = lambda path: at.append((path, time.seconds))
    registry.script["/api/skills?page=2"] = [Reply(b"", 500)] * 2
    summary, *_ = sync(registry, tmp_path, http__requests_per_second=1, http__min_backoff=1, http__max_backoff=10)
    assert summary["num_requests"] == len(registry.log) == 13
    # 13 requests: 12 gaps of a second, but the back-off of 2 seconds before the third try is one second longer
    assert time.seconds - 1000 == pytest.approx(13)
    gaps = [later - earlier for (_, earlier), (_, later) in pairwise(at)]
    assert min(gaps) >= 1 - 1e-9
    registry.script["/api/get/s0"] = [Reply(b"", 500)] * 6
    time.slept.clear()
    sync(registry, tmp_path, "b", http__min_backoff=1, http__max_backoff=10, http__attempts=6, state=tmp_path / "s")
    assert [seconds for seconds in time.slept if seconds > 0.5] == pytest.approx([1, 2, 4, 8, 10], abs=1e-4)


@pytest.mark.parametrize(
    ("reply", "seconds"),
    [
        (Reply(b"", 429, {"Retry-After": "33"}), 33),
        (Reply(b"", 503, {"Retry-After": "0"}), 0),
        (Reply(b"", 403, {"Retry-After": "60"}), 60),
        (Reply(b"", 429, {"Retry-After": formatdate(1077, usegmt=True)}), 77),
        (Reply(b"", 429, {"Retry-After": "soon"}), 0),
    ],
    ids=lambda value: str(value),
)
def test_retry_after_is_honoured(registry, tmp_path, time, reply, seconds):
    registry.skills = {"s0": registry.skills["s0"]}
    registry.script["/api/get/s0"] = [reply]
    sync(registry, tmp_path)
    assert time.seconds - 1000 == pytest.approx(seconds, abs=1e-3)
    assert registry.downloads() == ["s0", "s0"]


def test_a_wait_beyond_patience_ends_the_run_which_goes_on_later(registry, tmp_path):
    registry.script["/api/get/s3"] = [Reply(b"", 429, {"Retry-After": "7200"})]
    assert "asks to wait 7,200 seconds (HTTP 429)" in failure(registry, tmp_path)
    assert len(sync(registry, tmp_path)[1]) == 7
    assert registry.downloads() == ["s3", "s4", "s5", "s6"]


def test_a_steady_drip_is_cut_off(registry, tmp_path, time):
    time.tick = 100.0
    registry.skills = {"s0": Entry(random.Random(0).randbytes(3_000_000)), "s1": registry.skills["s1"]}
    _, _, _, rows = sync(registry, tmp_path)
    assert [(row["skill_id"], "longer than 600 seconds" in row["reason"]) for row in rows] == [("s0", True)]


RUN = """
import json, sys
from pathlib import Path
from skilltrain.config import validate
from skilltrain.data.collect.collect import CollectConfig, run_collect
run_collect(validate(CollectConfig, json.loads(sys.argv[1]), "test"), Path(sys.argv[2]))
"""


def hear_ctrl_c():
    """Undo what a shell does to programs that it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_at(registry, root, path, how):
    """Run a collector in a process of its own and stop it by signal `how` while it waits for the answer to `path`."""
    reached, go_on = threading.Event(), threading.Event()

    def hold(asked):
        if asked == path:
            reached.set()
            go_on.wait(60)

    registry.before = hold
    (root / "killed").mkdir()
    config = config_for(registry, root).model_dump_json()
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    with subprocess.Popen(
        [sys.executable, "-c", RUN, config, str(root / "killed")], env=environment, stderr=subprocess.PIPE,
        preexec_fn=hear_ctrl_c,
    ) as process:  # fmt: skip
        assert reached.wait(120), process.communicate()[1]
        process.send_signal(how)
        process.wait(60)
    go_on.set()
    registry.before = lambda path: None
    assert process.returncode != 0


@pytest.mark.parametrize(
    ("path", "how"),
    [
        ("/api/skills?page=2", signal.SIGKILL),
        ("/api/get/s4", signal.SIGKILL),
        ("/api/get/s4", signal.SIGINT),
    ],
    ids=["killed in the listing", "killed in the downloads", "Ctrl-C in the downloads"],
)
def test_a_stopped_run_goes_on_where_it_was_and_asks_for_nothing_twice(registry, tmp_path, path, how):
    stop_at(registry, tmp_path, path, how)
    before = list(registry.paths)
    assert before[-1] == path
    _, skills, dropped, _ = sync(registry, tmp_path)  # clears the log
    assert len(skills) == 7
    assert not dropped
    asked = before + registry.paths
    # the request that was under way is made again; no other
    assert {p for p in asked if asked.count(p) > 1} == {path}
    assert set(asked) == {f"/api/skills?page={n}" for n in (1, 2, 3, 4)} | {f"/api/get/s{n}" for n in range(7)}
    assert [p.name for p in (tmp_path / "state").iterdir() if "partial" in p.name] == []


def test_a_database_that_is_none_another_registry_and_another_collector_are_refused(registry, tmp_path):
    assert "state must not lie in out" in failure(registry, tmp_path, state=tmp_path / "out" / "state")
    sync(registry, tmp_path)
    message = failure(registry, tmp_path, registry__base_url="http://localhost:1")
    assert "holds what was collected from http://127" in message
    with open_state(tmp_path / "state", registry.base_url):
        assert "another process is writing" in failure(registry, tmp_path)
    for file in (tmp_path / "state").glob(f"{DATABASE}*"):
        file.unlink()
    (tmp_path / "state" / DATABASE).write_text("not a database")
    assert "cannot be read or written as the state of a collector" in failure(registry, tmp_path)
    assert "cannot write" in failure(registry, tmp_path, state=tmp_path / "state" / DATABASE / "state")


def test_pages_that_are_there_are_read_with_other_keys_too(registry, tmp_path):
    registry.before = lambda path: Reply(b"", 500) if path == "/api/skills?page=3" else None
    assert "the pages before are kept: run again" in failure(registry, tmp_path)
    registry.before = lambda path: None
    assert len(sync(registry, tmp_path, registry__keys={"digest": "sha256"})[1]) == 7
    assert registry.paths[0] == "/api/skills?page=3"


def test_a_cursor_that_the_registry_has_forgotten_begins_the_listing_anew(registry, tmp_path):
    registry.style = "cursor"
    registry.script["/api/skills?cursor=6"] = [Reply(b"", 500)] * 3 + [Reply(b"", 410)]
    assert "HTTP 500 (tried 3 times) (the pages before are kept: run again)" in failure(
        registry, tmp_path, registry__pages=CURSOR
    )
    assert "HTTP 410 (run again to read the listing anew)" in failure(registry, tmp_path, registry__pages=CURSOR)
    assert registry.paths == ["/api/skills?cursor=6"]
    assert len(sync(registry, tmp_path, registry__pages=CURSOR)[1]) == 7
