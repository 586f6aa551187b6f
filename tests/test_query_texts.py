"""Texts of queries: names of skills in them, and their variety."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.data.query_texts import (
    names_program,
    names_skill,
    programs_of,
    query_profile,
    without_name,
)
from skilltrain.texts import num_words

# Queries, separated by |, that do and do not hold the name of a skill.
NAMED = {
    "web-scraper": (
        "a Web Scraper for me|run web_scraper|my WebScraper broke|webscraper?|WEB-SCRAPER|"
        "web.scraper"
    ),
    "WebScraper": "web  scraper",
    "pdf": "Turn this PDF into text|ask ＰＤＦ",
    "pandoc": "use pandoc's filters",
    "天气预报": "请帮我查天气预报好吗",
    "luma": "使用luma生成视频",
    "⚡": "what does ⚡ mean",
}
NOT_NAMED = {
    "web-scraper": "scraper for the web|webscrapers|a web page scraper|cobweb scraper|web",
    "pdf": "merge two pdfs",
    "cat": "a category",
    "git": "push it to GitHub",
    "天气预报": "天气怎么样，预报呢",
    "": "anything",
}


@pytest.mark.parametrize("name", NAMED)
def test_name_is_found_in_any_form(name: str):
    for query in NAMED[name].split("|"):
        assert names_skill(query, name), query


@pytest.mark.parametrize("name", NOT_NAMED)
def test_name_is_found_only_as_whole_words(name: str):
    for query in NOT_NAMED[name].split("|"):
        assert not names_skill(query, name), query


WORDS = st.lists(st.text("abcxyz", min_size=1, max_size=4), min_size=1, max_size=4)


@given(WORDS, st.text(max_size=20), st.text(max_size=20))
def test_name_between_spaces_is_found(words: list[str], start: str, end: str):
    assert names_skill(f"{start} {' '.join(words).upper()} {end}", "-".join(words))


def test_name_is_removed_in_any_form():
    text = "Use PDF-tools, pdf tools or PDFTools; pdf toolsets stay"

    assert without_name(text, "pdf-tools") == "Use , or ; pdf toolsets stay"
    assert without_name("请用luma生成视频", "luma") == "请用 生成视频"
    assert without_name("anything", "---") == "anything"


CLIPS = """# Cut clips
```bash
$ sudo ffmpeg -i in.mp4 out.mp4
cd clips && ls
whisper-cli --model small out.mp4
# then
python cut.py
```
Use `sox` for the rest.
```python
import ffmpegio
```
"""


def test_programs_are_started_in_shell_blocks():
    """Common programs such as cd, git and python do not count."""
    console = "```console\n$ gh pr list\n> kubectl get pods\n$ git push\npapers = [1]\n```"

    assert programs_of(CLIPS) == {"ffmpeg", "whisper-cli"}
    assert programs_of(console) == {"gh", "kubectl"}
    assert programs_of("ffmpeg -i a") == frozenset()


@pytest.mark.parametrize(
    ("query", "is_named"),
    [
        ("cut it with FFmpeg", True),
        ("run whisper cli on it", True),
        ("cut the clip", False),
        ("use ffmpegio", False),
    ],
)
def test_program_is_found_in_query(query: str, is_named: bool):
    assert names_program(query, CLIPS) == is_named


@pytest.mark.parametrize(
    ("text", "count"),
    [("Don't re-run GPT-4 twice.", 4), ("整理发票", 2), ("整理PDF发票吧", 4)],
)
def test_words_are_counted_in_both_scripts(text: str, count: int):
    assert num_words(text) == count


def test_query_profile_equals_hand_calculation():
    texts = ["Sort my mail by day", "sort my mail by month now", "Sort my mail by day"]

    profile = query_profile(texts)

    expected = {
        "median_words": 5,
        "p90_words": 5.8,  # of 5, 5 and 6
        "distinct_texts": 0.6667,
        "distinct_openings": 0.3333,
        "distinct_words": 0.4375,  # 7 of 16: sort my mail by day month now
        # 5 of 3 + 4 + 3: sort my mail, my mail by, mail by day, mail by month, by month now
        "distinct_trigrams": 0.5,
    }
    assert profile == pytest.approx(expected)


def test_profile_of_no_queries_is_empty():
    assert query_profile([]) == {}
