"""Texts of queries: what names a skill, how varied a set is, and passages of skills that become some."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.data.own_text import MAX_WORDS, MIN_WORDS, own_queries
from skilltrain.data.pool.read import read_source
from skilltrain.data.query_texts import (
    names_program,
    names_skill,
    programs_of,
    query_profile,
    without_name,
)
from skilltrain.records import Skill
from skilltrain.texts import num_words

NAMED = {
    "web-scraper": "a Web Scraper for me|run web_scraper|my WebScraper broke|webscraper?|WEB-SCRAPER|web.scraper",
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


def test_programs_are_what_shell_blocks_start_and_not_everybody_does() -> None:
    assert (
        programs_of(CLIPS) == {"ffmpeg", "whisper-cli"}
        and programs_of("ffmpeg -i a") == frozenset()
    )
    console = "```console\n$ gh pr list\n> kubectl get pods\n$ git push\npapers = [1]\n```"
    assert programs_of(console) == {"gh", "kubectl"}
    for query in ("cut it with FFmpeg", "run whisper cli on it"):
        assert names_program(query, CLIPS)
    for query in ("cut the clip", "use ffmpegio"):
        assert not names_program(query, CLIPS)


def test_words_are_counted_in_both_scripts() -> None:
    assert [
        num_words(text) for text in ("Don't re-run GPT-4 twice.", "整理发票", "整理PDF发票吧")
    ] == [4, 2, 4]


def test_the_profile_of_queries_by_hand() -> None:
    texts = ["Sort my mail by day", "sort my mail by month now", "Sort my mail by day"]
    assert (
        query_profile(texts)
        == pytest.approx(
            {
                "median_words": 5,
                "p90_words": 5.8,  # of 5, 5, 6
                "distinct_texts": 0.6667,
                "distinct_openings": 0.3333,
                "distinct_words": 0.4375,  # sort my mail by day month now, of 16
                "distinct_trigrams": 0.5,  # of 3 + 4 + 3: sort my mail, my mail by, mail by day, mail by month, by month now
            }
        )
    )
    assert query_profile([]) == {}


# Passages of a skill that become queries --------------------------------------

LIBRARY = Path(__file__).parent.parent / "examples" / "skill_library" / "skills"
BODY = """# Invoice Sorter
## When to use
- User wants to sort **scanned invoices** by supplier and month
- Questions such as "Which supplier overcharged us last quarter?"
## Match invoices with purchase orders
Suppliers often send the same invoice twice with another number. Use `invoice-sorter`!
```bash
python sort.py --input secret_folder
```
## When not to use
- Paying salaries or planning next year's budget
## Installation
Run pip install with the name of the package first.
"""
BODY_ZH = """# 发票整理
## 使用场景
- 当用户需要按供应商和月份整理扫描的发票时
## 工作流程
供应商经常会用不同的编号重复发送同一张发票。
## 不适用
- 支付工资或者编制明年的预算
"""
INVOICES = Skill(
    "s1", "invoice-sorter", "The invoice sorter files paper by month and by supplier.", BODY
)


def test_passages_by_hand() -> None:
    queries, rest = own_queries(INVOICES, 9, 0)
    assert set(queries) == {
        "The files paper by month and by supplier.",
        "sort scanned invoices by supplier and month",
        "Which supplier overcharged us last quarter?",
        "Match invoices with purchase orders",
        "Suppliers often send the same invoice twice with another number.",
    }
    assert rest.description == ""
    for passage in ("scanned invoices", "overcharged", "purchase orders", "same invoice twice"):
        assert passage in BODY and passage not in rest.body
    assert "secret_folder" in rest.body and "salaries" in rest.body


def test_chinese_skills_have_chinese_queries() -> None:
    queries, rest = own_queries(
        Skill("s1", "发票整理", "把发票整理好，按月份和供应商存放纸质文件。", BODY_ZH), 9, 0
    )
    assert set(queries) == {
        "把 好，按月份和供应商存放纸质文件。",
        "按供应商和月份整理扫描的发票时",
        "供应商经常会用不同的编号重复发送同一张发票。",
    }
    assert rest.description == "" and "同一张发票" not in rest.body and "支付工资" in rest.body


def test_the_kinds_change_from_skill_to_skill_and_are_the_same_each_time() -> None:
    skills = [Skill(f"s{i}", INVOICES.name, INVOICES.description, BODY) for i in range(40)]
    made = [own_queries(skill, 1, 0) for skill in skills]
    assert made == [own_queries(skill, 1, 0) for skill in skills]
    num_described = sum(rest.description != "" for _, rest in made)
    assert 10 < num_described < 30 and len({queries[0] for queries, _ in made}) == 2


def test_nearly_every_real_skill_gives_the_queries_that_are_wanted() -> None:
    skills = [skill for skill in read_source(LIBRARY) if isinstance(skill, Skill)]
    assert len(skills) > 150
    skills = skills[::2]
    made = [own_queries(skill, 2, 0) for skill in skills]
    assert sum(len(queries) == 2 for queries, _ in made) >= 0.98 * len(skills)
    for skill, (queries, rest) in zip(skills, made, strict=True):
        assert all(MIN_WORDS <= num_words(query) <= MAX_WORDS for query in queries)
        assert not any(names_skill(query, skill.name) for query in queries)
        assert len(rest.description) + len(rest.body) < len(skill.description) + len(skill.body)
        assert not any(query in f"{rest.description}\n{rest.body}" for query in queries)


@given(st.text(max_size=300), st.text(max_size=20))
def test_no_skill_breaks_it(text: str, name: str) -> None:
    queries, _ = own_queries(Skill("s", name, text, text), 3, 0)
    assert len(queries) <= 3 and not any(names_skill(query, name) for query in queries)
