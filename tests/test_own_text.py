"""Requests from the skills' own texts can be understood alone, and are not left in the texts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.data.imperatives import MAX_WORDS, MIN_WORDS, passages_of
from skilltrain.data.own_text import own_queries
from skilltrain.data.pool.read import read_source
from skilltrain.data.query_texts import names_skill
from skilltrain.records import Skill
from skilltrain.texts import num_words

LIBRARY = Path(__file__).parent.parent / "examples" / "skill_library" / "skills"
BODY = """# Invoice Sorter
This skill renames scanned invoices after their suppliers.

## When to use
- User wants to sort **scanned PDF invoices** by supplier and month
- Questions such as "Which supplier overcharged us last quarter?" or "Is this a bill?"
- Spreadsheets, monthly closings
## Features
- Match invoices with purchase orders automatically
- Fast and reliable
## Workflow
Read the configuration file before each run. Use `invoice-sorter`!
```bash
python sort.py --input secret_folder
```
## When not to use
- Paying salaries or planning next year's budget
"""
DESCRIPTION = "Files scanned invoices and orders of one office. Use when paper piles up there."
INVOICES = Skill("s1", "invoice-sorter", DESCRIPTION, BODY)
BODY_ZH = """# 发票整理
## 使用场景
- 当用户需要整理扫描的 PDF 发票时
## 工作流程
读取配置文件，然后再运行脚本。
"""


def requests(text: str, name: str = "some-name", **settings: bool) -> list[str]:
    """Return the requests in a text of a skill."""
    return [passage.request for passage in passages_of(text, name, **settings)]


@pytest.mark.parametrize(
    ("text", "request_text"),
    [
        ("Extract tables from PDF files.", "Extract tables from PDF files"),
        ("This skill extracts tables from PDF files.", "Extract tables from PDF files"),
        ("Helps you to extract tables from old files.", "Extract tables from old files"),
        ("Use when the user asks to merge many PDF files.", "Merge many PDF files"),
        ("Use this skill when merging large PDF files (any size).", "Merge large PDF files"),
        ("Use for stopping jobs, or when planning a trip by train.", "Plan a trip by train"),
        ("Analyzes the user's invoices for wrong sums.", "Analyze my invoices for wrong sums"),
        ("Automatically turn your notes into slides 📊", "Turn my notes into slides"),
        ("Monitors checks and notifies a team of faults", "Monitor checks and notify a team"),
        ("该工具能够创建带有公司标识的发票。", "创建带有公司标识的发票"),
        ("当用户需要查询股票去年的历史价格时使用。", "查询股票去年的历史价格"),
    ],
)
def test_clause_becomes_imperative_request(text: str, request_text: str):
    assert requests(text)[0].startswith(request_text)


@pytest.mark.parametrize(
    "text",
    [
        "v5 vs v6 API Changes",  # a heading
        "Red Flags - STOP and Check Skills",
        "A fast and complete toolkit for tables.",  # no verb
        "This skill provides guidance for pandas users.",  # about the skill itself
        "Supports CSV files and JSON files.",
        "Always read the reference file first.",  # an order to the agent
        "Never delete the tables of a user.",
        "Create the table with `create_table(name)`.",  # code
        "Writing changelogs by hand is tedious.",  # a statement
        "Generate the answer before the",  # cut off
        "Get more of it below in this file.",
        "Design tokens, global styles and page templates",  # nouns
        "Read the log of a run and leaves a list of faults.",  # mixed forms
        "WHERE clauses, ORDER BY clauses and date literals",
        "Release planning & coordination with all teams",
        "Add the recipe to any lists of a user.",  # claims about the tool
        "Search 78 public databases of proteins.",
        "Reserve tables before the user approval of a plan.",  # words to the agent
        "Turn brittle scripts into resilient workflows.",  # a slogan
        "Read the menus of a phone line, handle calls and hang up",  # two tasks without "and"
        "Plan a trip to a given city.",  # a gap for a word
        "Sort the photos of a folder, or print them",  # alternatives
        "Test an agent against attacks across 14 categories.",
        "Sort the invoices, pay the bills, send the letters, and write the minutes",
        "该平台的命令行工具",
        "修复了三个可能导致死锁的问题。",
        "查询公司余额或监控股票交易状态。",
        "Triggers: find pain points, search the market, get new ideas",
        "Investigar dominios desconocidos con mapeo barato.",
        "获取新客户的成本是保留现有客户的五倍。",
        "Compare what a site looks like now vs. what it looked like in May.",  # cut at "vs."
        "Send a new picture wearing...",  # unfinished
        "Query all open invoices via their REST API v3.",  # another thing's property
        "Perform scoring to rank the most relevant results of any external APIs.",
        "Create a backup commit before the GLM runs.",  # steps of a workflow
        "Check for product marketing context first.",
        "Connect my agent's consciousness to the collective.",  # something unseen
        "Explain like 3Blue1Brown.",  # no object
        "Pull request reviews and code checks of a team.",  # a noun
        "Reduce churn of PDF readers by asking early.",  # a benefit
        "Enrich the CRM records through voice commands or home apps.",  # a channel of a tool
        "Show the mobile path only in supported environments.",
        "Screen Flow provides similar capabilities for admins.",  # a statement
        "Detect drift of code and docs by age, freshness checks of pages",  # joined texts
        "Implement an integration between a student system.",
        "Rotate all passwords of one database and syncs to Kubernetes.",  # mixed forms
        "**Sort old mail of one team.** No API keys",
        "Delegate fixes of a build to Builder.",  # roles of a tool
        "Start the Product Guide Writer for the first time.",
        "Send PDF files on behalf of the agent.",
        "Start handlers of PDF files at 100 or higher.",  # rules
        "Send a PDF file to Slack when user taps a button.",
        "Monitor all nodes of a cluster only.",
        "Write an ADR for a team when a decision.",  # cut off
        "Scan PDF files of a bank BEFORE a backup.",  # emphasis of a rule
        "Set up the cert, the credential, and a caller of an API for tests.",  # something unseen
        "Read a file and/or folder of PDF files.",
        "Read PDF files that stand in the prompt.",
        "Write answers back into a PDF file.",  # a step
        "Operate through a modular pipeline of five stages.",
        "Read PDF tables and other files of a bank.",  # open ends
        "Build servers for a shop, whether in Python or Node.",
        "检测102种安全风险并生成报告。",  # claims about the tool
        "审计日志记录、紧急停止功能、身份验证、技能审核以及网关保护。",
        "连接器查询钱包数据和代币价格。",  # a noun
        "Add notes to a shared Miro board, useful for all teams.",  # a remark
        "获取一个新的 API 密钥，然后发送真实邮件。",
        "Write Makefiles for any type of C project.",  # claims about the tool
        "Search 1B+ messages of old Slack users.",
        "Attach PDF magnets/links to a page of the team.",  # two things with a slash
    ],
)
def test_fragment_makes_no_request(text: str):
    assert requests(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "Create, search, and organize notes",  # lists of capabilities
        "Search old chats, and list all messages",
        "管理群组会议、屏幕共享",
        "Monitor performance and manage AI agents",  # two tasks
        "View guides and documentation",  # nothing specific
        "Filter recipes by tags",
        "监控各项成长指标",
        "Get variety with many rotating prompts",  # verbs that say little
        "Take any action on my account",
        "Create a new piece",  # objects that may be anything
        "Distribute content across platforms",
        "Start the first step",
        "Store it in a table of the project",  # "it" points elsewhere
        "View READMEs and documentation",  # pairs without a purpose
        "Generate Playwright or Cypress code",
        "Connect my Slack bot for persistent memory",  # connected to what
        "Orchestrate the validation workflow of new tests",
        "Design an agentic capability",  # nouns that say little
        "Add a functionality to my page",
        "Create README files for my customizations",
        "Localize every aspect of VS Code",
        "Optimize team productivity and business outcomes of teams",
    ],
)
def test_vague_text_makes_no_request(text: str):
    assert requests(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "Find open invoices of one client",  # a preposition
        "Convert a CHANGELOG.md file",  # a name
        "Find unused and outdated packages of a project",  # seven words
        "Send Slack messages",  # three words with a name
        "Read a table of sales and sort it by month",  # "it" has a noun in front
        "Create checks that balance speed with safety",  # "balance" needs "with"
        "Validate cards against the Agent Card schema",  # a name, not a role
        "Merge all the invoices, receipts, and orders of one year into one PDF file",
        "Search old mails for letters, photos and stamps of one client",  # a list with one comma
        "Read the log of a failed run and list its faults",
    ],
)
def test_specific_text_makes_request(text: str):
    assert requests(text) == [text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Creating new slides for a talk", ["Create new slides for a talk"]),
        ("Design patterns for a web shop", []),
    ],
)
def test_gerund_counts_only_where_use_is_described(text: str, expected: list[str]):
    assert requests(text, is_about_use=True) == expected
    assert requests(text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Manage incidents of a whole team via PagerDuty API.", 6),
        ("Manage incidents and schedules via PagerDuty API.", 0),  # nothing specific is left
        ("PagerDuty lists all open incidents of a team.", 7),
        ("List all PagerDuty incidents of a team.", 0),
        ("Connect the phone to PagerDuty-bots of a team.", 0),
    ],
)
def test_name_is_removed_with_its_phrase(text: str, expected: int):
    words = [len(request.split()) for request in requests(text, "pager-duty")]

    assert words == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("text", "request_text"),
    [
        ("Create robust reports for my sales team.", "Create reports for my sales team"),
        ("Write an advanced test for my parser.", "Write a test for my parser"),
        ("Reduce PDF sizes for faster sharing.", "Reduce PDF sizes"),
        ("Reduce PDF sizes while keeping the quality.", "Reduce PDF sizes"),
        ("Reduce PDF sizes with smart image scoring.", "Reduce PDF sizes"),
        ("Reduce PDF sizes across multiple folders.", "Reduce PDF sizes"),
        ("Reduce PDF sizes automatically.", "Reduce PDF sizes"),
        ("Build an SQL query from natural language.", "Build an SQL query"),
        ("Mark a PDF file with a logo.", "Mark a PDF file with a logo"),
        ("Test Node apps with GitHub Actions.", "Test Node apps with GitHub Actions"),
        ("Compare two invoices with old orders.", "Compare two invoices with old orders"),
        ("检测代码中的安全漏洞，保护用户免受攻击。", "检测代码中的安全漏洞"),
        ("Reduce PDF sizes without opening Acrobat.", "Reduce PDF sizes"),
        ("Reduce PDF sizes through an editor-native interface with tags.", "Reduce PDF sizes"),
        ("Reduce PDF sizes in various formats and qualities.", "Reduce PDF sizes"),
        ("Reduce PDF sizes with a single command.", "Reduce PDF sizes"),
        (
            "Manage pages for site generators like Hugo, Jekyll, and Astro.",
            "Manage pages for site generators",
        ),
        ("Sort old photos for user's albums.", "Sort old photos for my albums"),
        (
            "Modify tests that control all requests or assert on their responses.",
            "Modify tests that control all requests or assert on their responses",
        ),
    ],
)
def test_praise_is_cut_from_request(text: str, request_text: str):
    assert requests(text) == [request_text]


def test_clearest_level_becomes_queries():
    queries, remainder = own_queries(INVOICES, 1, 0)

    assert queries == ["Sort scanned PDF invoices by supplier and month"]
    assert "by supplier and month" in BODY
    assert "by supplier and month" not in remainder.body
    assert "secret_folder" in remainder.body
    assert "salaries" in remainder.body
    assert remainder.description == DESCRIPTION


@pytest.mark.parametrize(
    ("line", "query"),
    [
        ('You may say "Sort my PDF invoices by month" to begin.', "Sort my PDF invoices by month"),
        ('The agent asks: "How many invoices are in my PDF file?"', None),  # the agent's question
        ('## When to use\n"请检查X公司的最新发票"', None),  # a gap
        ("### Sort my PDF invoices by month", "Sort my PDF invoices by month"),
        ("### Sort My PDF Invoices by Month", None),  # a title
    ],
)
def test_quoted_tasks_and_headings_become_queries(line: str, query: str | None):
    skill = Skill("s1", "invoice-sorter", "Files paper of one office.", f"# Sorter\nIt\n{line}\n")

    queries, remainder = own_queries(skill, 1, 0)

    assert queries == ([query] if query else [])
    assert query is None or query not in remainder.body


def test_table_cells_become_queries():
    body = "## When to use\n| Task | Tool |\n| Sort my PDF invoices by month | sorter |\n"

    queries, _ = own_queries(Skill("s1", "invoice-sorter", "Files old paper.", body), 1, 0)

    assert queries == ["Sort my PDF invoices by month"]


def test_long_copies_of_shortened_request_are_removed():
    text = "Reduce PDF sizes of my bills for faster sharing of many large files"
    description = f"Tidy folders of small shops. {text}."
    body = f"# Sizes\n{text} and chat.\n"

    queries, remainder = own_queries(Skill("s1", "sizes-keeper", description, body), 1, 0)

    assert queries == ["Reduce PDF sizes of my bills"]
    assert "faster sharing" not in remainder.description + remainder.body


def test_chinese_passages_become_queries():
    description = "按月份和供应商存放纸质发票。"

    queries, remainder = own_queries(Skill("s1", "发票助手", description, BODY_ZH), 9, 0)

    assert queries == ["整理扫描的 PDF 发票"]
    assert remainder.description == description
    assert "PDF" not in remainder.body


def test_description_keeps_saying_what_skill_does():
    description = "Convert PDF tables to Excel sheets. Use when tables must be compared by hand."
    skill = Skill("s1", "tables", description, "# Tables\nRun the script.")

    queries, remainder = own_queries(skill, 2, 0)

    assert (queries, remainder) == ([], skill)


@pytest.mark.parametrize(
    ("feature", "num_queries"),
    [
        ("Merge sums of old runs", 0),  # nothing specific, and no word of the name
        ("Merge sums of old PDF runs into files", 0),  # only a name
        ("Merge an old ledger of one keeper into files", 0),  # only words of the skill's name
        ("Merge a ledger of old PDF runs into files", 1),  # both
        ("Merge a ledger of old PDF runs when files are old", 0),  # a condition
        ("Repair DVD players of an old type", 0),  # another topic
    ],
)
def test_only_clear_features_become_queries(feature: str, num_queries: int):
    description = "Results that banks publish. Add sums up for an audit."
    skill = Skill("s1", "ledger-keeper", description, f"## Features\n- {feature}\n")

    queries, _ = own_queries(skill, 3, 0)

    assert queries.count(feature) == num_queries


@pytest.mark.parametrize(("heading", "num_queries"), [("When to use", 1), ("Features", 0)])
def test_use_needs_fewer_signs_than_feature(heading: str, num_queries: int):
    body = f"## {heading}\n- Merge sums of old PDF runs into files\n"
    skill = Skill("s1", "ledger-keeper", "Results of banks that publish sums.", body)

    queries, _ = own_queries(skill, 1, 0)

    assert len(queries) == num_queries


def test_long_first_sentence_becomes_query():
    description = (
        "List prices of old stamps by country and year. Returns the average of ten auctions."
    )

    queries, _ = own_queries(Skill("s1", "philately", description, ""), 1, 0)

    assert queries == ["List prices of old stamps by country and year"]


def test_short_first_sentence_with_name_becomes_query():
    skill = Skill("s1", "q", "Trade Solana tokens. Use when the user wants to swap coins.", "")

    queries, _ = own_queries(skill, 1, 0)

    assert queries == ["Trade Solana tokens"]


def test_clearest_passages_become_queries():
    description = "Keep track of all invoices. Sort invoices by month."
    body = (
        "## Features\n- Find invoices in PDF files of suppliers\n- Sort all invoices into boxes\n"
    )

    queries, _ = own_queries(Skill("s1", "invoice-sorter", description, body), 3, 0)

    assert queries
    assert all("PDF" in query for query in queries)


def test_any_verb_says_what_skill_is_for():
    description = "List prices of old stamps by country. Returns the average of ten auctions."

    queries, remainder = own_queries(Skill("s1", "stamp-dealer", description, ""), 1, 0)

    assert len(queries) == 1
    assert remainder.description == "Returns the average of ten auctions."


def test_repeats_of_passage_are_removed():
    description = "Tidy bookkeeping for small shops. Match PDF invoices with purchase orders."
    body = "# Sorter\n\nMatch all PDF invoices with purchase orders.\n\nWork through the list."

    queries, remainder = own_queries(Skill("s1", "invoice-sorter", description, body), 1, 0)

    assert queries[0] in {
        "Match PDF invoices with purchase orders",
        "Match all PDF invoices with purchase orders",
    }
    assert "Match" not in remainder.description + remainder.body
    assert remainder.description.startswith("Tidy bookkeeping for small shops.")


def test_rule_with_words_of_short_request_stays():
    description = "Chat for small shops. Send Slack messages."
    rule = "Never send bulk messages to Slack channels without asking the owner first."
    body = f"# Chat\n\n{rule}\n\nYou can send Slack messages to channels, groups and users.\n"

    queries, remainder = own_queries(Skill("s1", "shop-messages", description, body), 1, 0)

    assert queries == ["Send Slack messages"]
    assert rule in remainder.body
    assert "send Slack messages" not in remainder.body


def test_first_paragraph_replaces_masked_description():
    paragraph = "A command line program that cuts long recordings and cleans their sound."
    skill = Skill(
        "s1", "denoise-speech", "Remove noise from speech recordings.", f"# Wave\n\n{paragraph}"
    )

    queries, remainder = own_queries(skill, 2, 0)

    assert queries == ["Remove noise from speech recordings"]
    assert remainder.description == paragraph


def test_same_seed_gives_same_queries():
    body = "## When to use\n- Sort my PDF invoices by month\n- Scan my PDF invoices by year\n"
    skills = [Skill(f"s{i}", "sorter", DESCRIPTION, body) for i in range(20)]

    results = [own_queries(skill, 1, 0) for skill in skills]

    assert results == [own_queries(skill, 1, 0) for skill in skills]
    assert len({queries[0] for queries, _ in results}) == 2, "skills differ in the passage"


def test_real_skills_give_queries():
    skills = [skill for skill in read_source(LIBRARY) if isinstance(skill, Skill)]
    assert len(skills) > 150

    num_with_query = 0
    for skill in skills:
        queries, remainder = own_queries(skill, 2, 0)
        num_with_query += len(queries) > 0
        assert remainder.description
        for query in queries:
            assert MIN_WORDS <= num_words(query) <= MAX_WORDS
            assert not names_skill(query, skill.name)
            assert query not in f"{remainder.description}\n{remainder.body}"

    assert num_with_query >= 0.45 * len(skills)


@given(st.text(max_size=300), st.text(max_size=20))
def test_any_skill_gives_valid_queries(text: str, name: str):
    queries, remainder = own_queries(Skill("s", name, text, text), 3, 0)

    assert len(queries) <= 3
    assert not any(names_skill(query, name) for query in queries)
    assert not queries or remainder.description


@pytest.mark.parametrize("place", ["description", "when_to_use", "body"])
@pytest.mark.parametrize(
    "text",
    [
        f"a{' ' * 19_000}b",
        "a" * 19_000,
        "检查引用内容" * 3_000,
        "sort a list with " * 6_000,
        "x|" * 50_000,
        "any " * 25_000,
    ],
)
def test_hostile_texts_are_read_once(text: str, place: str):
    """These texts took from ten seconds to minutes when patterns read them again and again."""
    # A longer header is not read. Only spaces are squeezed before the length is checked.
    if place != "body" and " " * 100 not in text:
        text = text[:4_900]
    texts = {"description": "Old paper of small shops.", "body": "# Sorter\n", "when_to_use": ""}
    texts[place] += f"\n## Features\n- Sort my PDF bills by month\n- {text}"

    queries, remainder = own_queries(Skill("s", "bills-keeper", **texts), 3, 0)

    assert "Sort my PDF bills by month" in queries
    assert " " * 100 not in f"{remainder.description}{remainder.when_to_use}{remainder.body}"


@pytest.mark.parametrize("place", ["description", "when_to_use"])
def test_very_long_header_makes_no_query(place: str):
    body = "## Features\n- Sort my PDF bills by month\n"
    texts = {"description": "Tidy bills of small shops.", place: "Bills of shops. " * 400}
    skill = Skill("s", "name", body=body, **texts)

    queries, remainder = own_queries(skill, 3, 0)

    assert (queries, remainder) == ([], skill)
