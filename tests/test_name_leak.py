"""names_skill: whole words, whatever the case and the separators; strict about single words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.data.query_texts import names_program, names_skill, programs_of


@pytest.mark.parametrize(
    "query",
    ["a Web Scraper for me", "run web_scraper", "my WebScraper broke", "webscraper?", "WEB-SCRAPER", "web.scraper",
     "web  scraper"],
)  # fmt: skip
def test_separators_and_case_do_not_hide_a_name(query: str) -> None:
    assert names_skill(query, "web-scraper")
    assert names_skill(query, "WebScraper")


@pytest.mark.parametrize("query", ["scraper for the web", "webscrapers", "a web page scraper", "cobweb scraper", "web"])
def test_other_words_are_not_the_name(query: str) -> None:
    assert not names_skill(query, "web-scraper")


def test_a_single_word_leaks_as_a_whole_word_only() -> None:
    assert names_skill("Turn this PDF into text", "pdf")
    assert names_skill("use pandoc's filters", "pandoc")
    assert not names_skill("merge two pdfs", "pdf")
    assert not names_skill("a category", "cat")
    assert not names_skill("push it to GitHub", "git")


def test_chinese_names_are_found_without_spaces_and_beside_latin_words() -> None:
    assert names_skill("请帮我查天气预报好吗", "天气预报")
    assert names_skill("使用luma生成视频", "luma")
    assert not names_skill("天气怎么样，预报呢", "天气预报")


def test_full_width_letters_and_names_without_letters() -> None:
    assert names_skill("ask ＰＤＦ", "pdf")
    assert not names_skill("anything", "")
    assert names_skill("what does ⚡ mean", "⚡")


@given(
    st.lists(st.text("abcxyz", min_size=1, max_size=4), min_size=1, max_size=4),
    st.text(max_size=20),
    st.text(max_size=20),
)
def test_a_name_between_spaces_always_leaks(parts: list[str], before: str, after: str) -> None:
    assert names_skill(f"{before} {' '.join(parts).upper()} {after}", "-".join(parts))


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


def test_programs_are_what_shell_blocks_start_and_not_everybody_does():
    assert programs_of(BODY) == {"ffmpeg", "whisper-cli"}
    assert programs_of("```console\n$ gh pr list\n> kubectl get pods\n$ git push\npapers = [1]\n```") == {
        "gh",
        "kubectl",
    }
    assert programs_of("ffmpeg -i a") == frozenset()


@pytest.mark.parametrize(
    ("query", "named"),
    [("cut it with FFmpeg", True), ("run whisper cli on it", True), ("cut the clip", False), ("use ffmpegio", False)],
)
def test_a_query_names_a_program_in_whole_words(query, named):
    assert names_program(query, BODY) is named
