"""Passages of real skills become queries that do not name them, and the skills are left without the passages."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from skilltrain.data.own_text import MAX_WORDS, MIN_WORDS, own_queries
from skilltrain.data.pool.read import read_source
from skilltrain.data.query_texts import names_skill
from skilltrain.records import Skill
from skilltrain.texts import num_words

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
INVOICES = Skill("s1", "invoice-sorter", "The invoice sorter files paper by month and by supplier.", BODY)


def test_passages_by_hand() -> None:
    queries, rest = own_queries(INVOICES, 9, 0)
    assert set(queries) == {
        "The files paper by month and by supplier.", "sort scanned invoices by supplier and month",
        "Which supplier overcharged us last quarter?", "Match invoices with purchase orders",
        "Suppliers often send the same invoice twice with another number.",
    }  # fmt: skip
    assert rest.description == ""
    for passage in ("scanned invoices", "overcharged", "purchase orders", "same invoice twice"):
        assert passage in BODY and passage not in rest.body
    assert "secret_folder" in rest.body and "salaries" in rest.body


def test_chinese_skills_have_chinese_queries() -> None:
    queries, rest = own_queries(Skill("s1", "发票整理", "把发票整理好，按月份和供应商存放纸质文件。", BODY_ZH), 9, 0)
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
