"""The log of use: its files, what it leaves out, and which requests it tells to learn from."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from faults import raises
from skilltrain.data import use_log
from skilltrain.data.queries import Queries
from skilltrain.data.use_log import CLIENT, UseLog, read_requests, redact, request_rows
from skilltrain.evaluation.inspect_data import inspect_queries
from skilltrain.files import write_jsonl
from skilltrain.tables import (
    DROPPED,
    SKILLS,
    read_queries,
    read_table,
    read_verdicts,
    write_table,
)
from small_library import succeeds

RANKING = [("a", 3.0), ("b", 2.0), ("c", 1.0)]
KEY = "sk-" + "q8Zt3LmXw2Yb7NcR5dKf9PvJ4sHg6TqB1xZn8MwC3yLk7RdVe"
# The pieces keep these paths from looking like those of one machine.
HOMES = "/" + "home/"
MAC_HOMES = "/" + "Users/"
ROOT_HOME = "/" + "root"
WRITER = """
import sys
from pathlib import Path
from skilltrain.data.use_log import UseLog

log = UseLog(Path(sys.argv[1]))
while True:
    log.add_answer("merge pdf " + "x" * 3000, "router", [("a", 1.0)])
"""


def lines_of(folder: Path) -> list[dict]:
    """Return the events of all files in a log."""
    files = sorted(folder.glob("use-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def log_use(folder: Path, *loads: str, query: str = "merge pdf") -> None:
    """Write one answer and some loads of its skills."""
    log = UseLog(folder)
    log.add_answer(query, "router", RANKING)
    for skill_id in loads:
        log.add_load(skill_id)


# Writing ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"use {KEY} and {KEY}!", "use [secret] and [secret]!"),
        ("open https://bo:pw12@x.org/a", "open [secret]x.org/a"),
        ("mail bo.li+x@mail.example.org now", "mail [email] now"),
        (f"join {HOMES}anna/a.pdf and {MAC_HOMES}Anna/b.pdf", "join ~/a.pdf and ~/b.pdf"),
        (f"in C:\\Users\\anna\\x and D:{MAC_HOMES}bo", "in ~\\x and ~"),
        ("in C:\\Users\\Bo Smith\\a and x", "in ~\\a and x"),
        (f"cat {ROOT_HOME}/.ssh/config", "cat ~/.ssh/config"),
        ("the /homepage of @anna costs 5$", "the /homepage of @anna costs 5$"),
    ],
)
def test_personal_data_are_redacted(text, redacted):
    assert redact(text) == redacted


def test_overlapping_secrets_are_one():
    text = f"https://user:{KEY}@host.example/x?api_key={KEY}"

    assert KEY[3:] not in redact(text)


def test_event_has_answer_and_router(tmp_path):
    log_use(tmp_path, "b", query=f"use {KEY}")

    answer, load = lines_of(tmp_path)
    assert (answer["query"], answer["router"]) == ("use [secret]", "router")
    assert list(answer["skills"].items()) == RANKING
    assert load["loaded"] == "b"
    assert load["session"] == answer["session"]


def test_log_holds_no_address(tmp_path):
    token = CLIENT.set("192.0.2.17")
    log_use(tmp_path, "a")
    CLIENT.reset(token)

    assert "192.0.2.17" not in str(lines_of(tmp_path))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_only_the_owner_can_read_the_log(tmp_path):
    folder = tmp_path / "log"

    log_use(folder, "a")

    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_long_file_is_followed_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr(use_log, "_MAX_FILE_BYTES", 100)
    log = UseLog(tmp_path)

    for _ in range(3):
        log.add_answer("merge pdf", "router", RANKING)

    assert len(list(tmp_path.iterdir())) == 3
    assert len(lines_of(tmp_path)) == 3


def test_new_day_begins_a_file(tmp_path, monkeypatch):
    log = UseLog(tmp_path)
    log.add_load("a")
    monkeypatch.setattr(time, "strftime", lambda *_: "20300101")

    log.add_load("b")

    assert len(list(tmp_path.glob("use-20300101-*.jsonl"))) == 1
    assert len(lines_of(tmp_path)) == 2


def test_oldest_files_of_a_long_log_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(use_log, "_MAX_FILE_BYTES", 0)
    monkeypatch.setattr(use_log, "_MAX_LOG_BYTES", 300)
    log = UseLog(tmp_path)

    for number in range(9):
        log.add_load(f"skill-{number}")

    skill_ids = [row["loaded"] for row in lines_of(tmp_path)]
    assert len(skill_ids) < 6
    assert skill_ids[-1] == "skill-8"


def test_file_may_be_removed_meanwhile(tmp_path, monkeypatch, capsys):
    log_use(tmp_path)
    gone = tmp_path / "use-1.jsonl"
    monkeypatch.setattr(Path, "glob", lambda *_: [gone])

    log_use(tmp_path)

    assert "cannot write the log" not in capsys.readouterr().err


def test_only_the_start_of_a_request_is_searched(tmp_path, monkeypatch):
    lengths = []
    monkeypatch.setattr(use_log, "redact", lambda text: lengths.append(len(text)) or text)

    UseLog(tmp_path).add_answer("a" * 10**6, "router", RANKING)

    assert lengths == [20_000]


def test_unwritten_events_are_written_later(tmp_path, capsys):
    log = UseLog(tmp_path / "log")
    (tmp_path / "log").rmdir()
    log.add_load("a")
    log.add_load("b")
    (tmp_path / "log").mkdir()

    log.add_load("c")

    assert [row["loaded"] for row in lines_of(tmp_path / "log")] == ["a", "b", "c"]
    assert capsys.readouterr().err.count("cannot write the log") == 1


def test_killed_processes_leave_a_readable_log(tmp_path):
    command = [sys.executable, "-c", WRITER, tmp_path]
    writers = [subprocess.Popen(command, env=os.environ) for _ in range(2)]
    while sum(file.stat().st_size for file in tmp_path.glob("use-*")) < 2**20:
        time.sleep(0.05)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.wait()

    requests = read_requests(tmp_path)

    assert len({request.session for request in requests}) == 2
    assert len(requests) > 300


# Reading ----------------------------------------------------------------------


def test_torn_last_line_is_left_out(tmp_path):
    log_use(tmp_path, "a")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + b'{"event": "answer", "ti')

    requests = read_requests(tmp_path)

    assert [request.loaded for request in requests] == [{"a"}]


def test_broken_line_is_refused(tmp_path):
    log_use(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{\n" + file.read_text())

    with raises("not-json"):
        read_requests(tmp_path)


def test_folder_as_file_of_a_log_is_refused(tmp_path):
    (tmp_path / "use-1.jsonl").mkdir()

    with raises("special-file"):
        read_requests(tmp_path)


def test_endless_line_of_a_log_is_refused(tmp_path, monkeypatch):
    log_use(tmp_path)
    monkeypatch.setattr("skilltrain.files._MAX_LINE_BYTES", 20)

    with raises("not-json") as caught:
        read_requests(tmp_path)

    assert "a line has more than 64 MiB" in caught.value.problem


def test_folder_without_a_log_is_refused(tmp_path):
    with raises("not-found"):
        read_requests(tmp_path)


@pytest.mark.parametrize(
    ("loads", "skipped"),
    [((), []), (("a",), []), (("c",), ["a", "b"]), (("a", "c"), ["b"]), (("x",), [])],
)
def test_only_skills_above_a_loaded_one_are_skipped(tmp_path, loads, skipped):
    log_use(tmp_path, *loads)

    (request,) = read_requests(tmp_path)

    assert request.skipped == skipped


def test_load_counts_for_the_newest_request(tmp_path):
    log = UseLog(tmp_path)
    log.add_answer("first", "router", RANKING)
    log.add_answer("second", "router", RANKING)
    log.add_answer("third", "router", [("d", 1.0)])

    log.add_load("b")

    loaded = {request.text: request.loaded for request in read_requests(tmp_path)}
    assert loaded == {"first": set(), "second": {"b"}, "third": set()}


def test_late_load_does_not_count(tmp_path, monkeypatch):
    log = UseLog(tmp_path)
    log.add_answer("merge pdf", "router", RANKING)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)

    log.add_load("b")

    (request,) = read_requests(tmp_path)
    assert not request.loaded


def test_load_in_another_session_does_not_count(tmp_path):
    log_use(tmp_path)

    UseLog(tmp_path).add_load("a")

    (request,) = read_requests(tmp_path)
    assert not request.loaded


# Queries ----------------------------------------------------------------------


@pytest.fixture
def pool(tmp_path) -> Path:
    """Write the skills a, b, c and b-copy, whose body is that of b."""
    bodies = {
        name: " ".join(f"{name}{number}" for number in range(50)) for name in ("a", "b", "c", "d")
    }
    bodies["b-copy"] = bodies["b"]
    rows = [
        {"skill_id": name, "name": name, "description": "d", "body": body, "source": "s"}
        for name, body in bodies.items()
    ]
    write_table(rows, SKILLS, tmp_path / "pool")
    return tmp_path / "pool"


def learn(pool: Path, **settings: Any) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Run the stage `queries` on a log, or on files.

    Returns:
        The verdicts by the text of the query and by skill id, and the filters of the dropped rows.
    """
    out = Path(tempfile.mkdtemp(dir=pool.parent))
    values = {"pool": pool, "out": out, **settings}
    if "files" not in values:
        values.setdefault("from_log", pool.parent / "log")
    Queries.model_validate(values).run(out)
    texts = {query.query_id: query.text for query in read_queries(out)}
    verdicts = {texts[query_id]: verdicts for query_id, verdicts in read_verdicts(out).items()}
    return verdicts, [row["filter"] for row in read_table(out, DROPPED).to_pylist()]


def test_log_becomes_queries(pool, tmp_path):
    log_use(tmp_path / "log", "b")

    verdicts, dropped = learn(pool)

    assert verdicts == {"merge pdf": {"a": "irrelevant", "b": "required"}}
    assert dropped == []


def test_request_without_a_load_is_dropped(pool, tmp_path):
    log_use(tmp_path / "log", "b")
    log_use(tmp_path / "log", query="nothing for me")

    verdicts, dropped = learn(pool)

    assert verdicts.keys() == {"merge pdf"}
    assert dropped == ["no_gold"]


def test_request_for_a_gone_skill_is_dropped(pool, tmp_path):
    log_use(tmp_path / "log", "b")
    log = UseLog(tmp_path / "log")
    log.add_answer("split pdf", "router", [("gone", 1.0)])
    log.add_load("gone")

    verdicts, dropped = learn(pool)

    assert verdicts.keys() == {"merge pdf"}
    assert dropped == ["missing_gold"]


def test_skipped_copy_is_no_negative(pool, tmp_path):
    log = UseLog(tmp_path / "log")
    log.add_answer("merge pdf", "router", [("a", 3.0), ("b-copy", 2.0), ("b", 1.0)])
    log.add_load("b")

    verdicts, dropped = learn(pool)

    assert verdicts == {"merge pdf": {"a": "irrelevant", "b": "required"}}
    assert dropped == ["near_duplicate"]


def test_one_session_cannot_dominate(pool, tmp_path):
    log = UseLog(tmp_path / "log")
    for number in range(9):
        log.add_answer(f"request {number}", "router", RANKING)
        log.add_load("a")
    log_use(tmp_path / "log", "b")

    verdicts, dropped = learn(pool, max_per_session=3)

    assert len(verdicts) == 4
    assert dropped == ["session_limit"] * 6


def test_repeated_request_counts_once(pool, tmp_path):
    for _ in range(3):
        log_use(tmp_path / "log", "b")

    verdicts, dropped = learn(pool)

    assert len(verdicts) == 1
    assert dropped == ["duplicate_query"] * 2


def test_excluded_queries_are_left_out(pool, tmp_path):
    log_use(tmp_path / "log", "b")
    log_use(tmp_path / "log", "a", query="split pdf")
    out = tmp_path / "first"
    succeeds("queries", "--from-log", tmp_path / "log", f"pool={pool}", f"out={out}")
    ids = {query.text: query.query_id for query in read_queries(out)}
    rows = [{"query_id": ["no id"]}, {"query_id": ids["split pdf"]}]
    write_jsonl(tmp_path / "exclude.jsonl", rows)

    verdicts, dropped = learn(pool, exclude=tmp_path / "exclude.jsonl")

    assert verdicts.keys() == {"merge pdf"}
    assert dropped == ["excluded"]


def test_whole_sessions_are_held_out(pool, tmp_path):
    for number in range(30):
        log = UseLog(tmp_path / "log")
        for part in ("a", "b"):
            log.add_answer(f"{number}-{part}", "router", RANKING)
            log.add_load("a")

    out = tmp_path / "queries"
    succeeds("queries", "--from-log", tmp_path / "log", f"pool={pool}", f"out={out}")

    splits: dict[str, set[str]] = {}
    for query in read_queries(out):
        splits.setdefault(query.text.partition("-")[0], set()).add(query.split)
    assert all(len(names) == 1 for names in splits.values())
    assert set.union(*splits.values()) == {"train", "dev"}


def test_repeated_request_is_in_one_split(tmp_path):
    for _ in range(30):
        log_use(tmp_path, "a")

    splits = {row["split"] for _, row in request_rows(tmp_path)}

    assert len(splits) == 1


def test_tables_are_read_as_files(pool, tmp_path):
    log_use(tmp_path / "log", "b")
    out = tmp_path / "queries"
    succeeds("queries", "--from-log", tmp_path / "log", f"pool={pool}", f"out={out}")

    verdicts, _ = learn(pool, files=out)

    assert verdicts == {"merge pdf": {"a": "irrelevant", "b": "required"}}


def test_log_and_files_go_together(pool, tmp_path):
    log_use(tmp_path / "log", "b")
    row = {"query": "split pdf", "skill_ids": ["c"], "split": "train"}
    write_jsonl(tmp_path / "mine.jsonl", [row])

    verdicts, _ = learn(pool, files=tmp_path / "mine.jsonl", from_log=tmp_path / "log")

    assert verdicts.keys() == {"merge pdf", "split pdf"}


def test_log_hides_no_fault_of_files(pool, tmp_path):
    log_use(tmp_path / "log", "b")
    row = {"query": "split pdf", "skill_ids": ["typo"], "split": "train"}
    write_jsonl(tmp_path / "mine.jsonl", [row])

    with raises("unknown-skill"):
        learn(pool, files=tmp_path / "mine.jsonl", from_log=tmp_path / "log")


def test_neither_log_nor_files_is_refused(pool, tmp_path):
    with pytest.raises(ValidationError, match="give 'files' or 'from_log'"):
        Queries(pool=pool, out=tmp_path / "queries")


def test_page_shows_what_will_be_learned(pool, tmp_path):
    log_use(tmp_path / "log", "b", query="merge <b>pdf</b>")
    log_use(tmp_path / "log", query="nothing for me")
    out = tmp_path / "queries"
    succeeds("queries", "--from-log", tmp_path / "log", f"pool={pool}", f"out={out}")

    outcome = succeeds("inspect", out)

    page = (tmp_path / "queries.html").read_text()
    (query,) = read_queries(out)
    assert "1 queries" in outcome.out
    assert query.query_id in page
    assert "merge &lt;b&gt;pdf" in page
    assert "requires no skill" in page


def test_page_in_its_folder_is_refused(pool, tmp_path):
    log_use(tmp_path / "log", "b")
    out = tmp_path / "queries"
    succeeds("queries", "--from-log", tmp_path / "log", f"pool={pool}", f"out={out}")

    with raises("overwrites-input"):
        inspect_queries(out, out / "page.html")
