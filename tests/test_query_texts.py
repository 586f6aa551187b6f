"""Which texts are queries: whole words that name a skill or its program, lengths, and how varied a set is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.data.query_texts import names_program, names_skill, programs_of, query_profile, without_name
from skilltrain.texts import num_words

NAMED = {
    "web-scraper": "a Web Scraper for me|run web_scraper|my WebScraper broke|webscraper?|WEB-SCRAPER|web.scraper",
    "WebScraper": "web  scraper", "pdf": "Turn this PDF into text|ask ＰＤＦ", "pandoc": "use pandoc's filters",
    "天气预报": "请帮我查天气预报好吗", "luma": "使用luma生成视频", "⚡": "what does ⚡ mean",
}  # fmt: skip
NOT_NAMED = {
    "web-scraper": "scraper for the web|webscrapers|a web page scraper|cobweb scraper|web", "pdf": "merge two pdfs",
    "cat": "a category", "git": "push it to GitHub", "天气预报": "天气怎么样，预报呢", "": "anything",
}  # fmt: skip


def test_a_name_is_found_in_whole_words_whatever_the_case_and_the_separators() -> None:
    for table, is_named in ((NAMED, True), (NOT_NAMED, False)):
        for name, queries in table.items():
            for query in queries.split("|"):
                assert names_skill(query, name) is is_named, (query, name)


PARTS = st.lists(st.text("abcxyz", min_size=1, max_size=4), min_size=1, max_size=4)


@given(PARTS, st.text(max_size=20), st.text(max_size=20))
def test_a_name_between_spaces_always_leaks(parts: list[str], before: str, after: str) -> None:
    assert names_skill(f"{before} {' '.join(parts).upper()} {after}", "-".join(parts))


def test_a_name_is_taken_out_however_it_is_written() -> None:
    text = "Use PDF-tools, pdf tools or PDFTools; pdf toolsets stay"
    assert without_name(text, "pdf-tools") == "Use , or ; pdf toolsets stay"
    assert without_name("请用luma生成视频", "luma") == "请用 生成视频"
    assert without_name("anything", "---") == "anything"


BODY = """# Cut clips
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


def test_programs_are_what_shell_blocks_start_and_not_everybody_does() -> None:
    assert programs_of(BODY) == {"ffmpeg", "whisper-cli"} and programs_of("ffmpeg -i a") == frozenset()
    console = "```console\n$ gh pr list\n> kubectl get pods\n$ git push\npapers = [1]\n```"
    assert programs_of(console) == {"gh", "kubectl"}
    for query in ("cut it with FFmpeg", "run whisper cli on it"):
        assert names_program(query, BODY)
    for query in ("cut the clip", "use ffmpegio"):
        assert not names_program(query, BODY)


def test_words_are_counted_in_both_scripts() -> None:
    assert [num_words(text) for text in ("Don't re-run GPT-4 twice.", "整理发票", "整理PDF发票吧")] == [4, 2, 4]


def test_the_profile_of_queries_by_hand() -> None:
    texts = ["Sort my mail by day", "sort my mail by month now", "Sort my mail by day"]
    assert query_profile(texts) == pytest.approx({
        "median_words": 5,
        "p90_words": 5.8,  # of 5, 5, 6
        "distinct_texts": 0.6667,
        "distinct_openings": 0.3333,
        "distinct_words": 0.4375,  # sort my mail by day month now, of 16
        "distinct_trigrams": 0.5,  # of 3 + 4 + 3: sort my mail, my mail by, mail by day, mail by month, by month now
    })  # fmt: skip
    assert query_profile([]) == {}
