import sys

import pytest
from scipy.stats import mannwhitneyu

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis import compare_structure, structure_features
from skilltrain.texts import words_of

SKILL = """# Deploy pods

Run `kubectl get pods`, then see [the guide](references/guide.md) and <https://example.com>.

Checks
------

1. first
2. second
   - nested `one`
   - nested two
3) another list

```bash
# no heading
python scripts/deploy.py
- no item
```

* last
"""


def test_features_worked_by_hand():
    code = "# no heading\npython scripts/deploy.py\n- no item\n"
    assert structure_features(SKILL.replace("\n", "\r\n")) == structure_features(SKILL)
    assert structure_features(SKILL) == {
        "words": 39,  # `2.` and `scripts/deploy.py` count as one and three
        "code share": len(code) / len(SKILL),
        "code blocks": 1,
        "headings": 2,
        "ordered items": 3,
        "unordered items": 3,
        "inline code per 100 words": 200 / 39,
        "links": 2,
        "mentions a script": 1,
        "mentions a reference file": 1,
    }


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("```\na\n```\n", ["a\n"]),
        ("~~~ python\na\n```\nb\n~~~\n", ["a\n```\nb\n"]),  # another kind of fence closes nothing
        ("```\na\n# b", ["a\n# b"]),  # unclosed: to the end
        ("> ```\n> a\nb", ["a\n"]),  # … of the quote that holds it
        ("    ```\n    a\n    ```\n", []),  # four spaces: code by indentation
        ("```\n```\n\n~~~\n\n\n~~~\n", ["", "\n\n"]),
    ],
)
def test_fences_follow_commonmark(body, code):
    found = structure_features(body)
    assert found["code blocks"] == len(code)
    assert found["code share"] == pytest.approx(sum(map(len, code)) / len(body))


@pytest.mark.parametrize(
    ("body", "headings", "ordered", "unordered", "inline", "links"),
    [
        ("#no\n\n####### no\n\n\\# no\n\n#\n\n  ## yes ##\n", 2, 0, 0, 0, 0),
        ("text\n2. no item\n\n2. item\n", 0, 1, 0, 0, 0),  # only 1. interrupts a paragraph
        ("1) a\n\n1. b\n\n- c\n+ d\n* e\n", 0, 2, 3, 0, 0),
        ("`` a`b `` and `c and \\`d`", 0, 0, 0, 2, 0),
        ("[a](b) ![c](d) [e] [f][g]\n\n[e]: /url\n", 0, 0, 0, 0, 2),
        ("<!-- # no\n- no -->\n", 0, 0, 0, 0, 0),
        ("", 0, 0, 0, 0, 0),
    ],
)
def test_headings_items_inline_code_and_links(body, headings, ordered, unordered, inline, links):
    found = structure_features(body)
    names = ("headings", "ordered items", "unordered items", "links")
    assert tuple(found[name] for name in names) == (headings, ordered, unordered, links)
    assert found["inline code per 100 words"] == pytest.approx(100 * inline / max(1, len(words_of(body))))


@pytest.mark.parametrize(
    ("body", "script", "reference"),
    [
        ("run `scripts/a-b/run_all.sh`", 1, 0),
        ("my-skill/scripts/run.py then ./references/api.v2.md", 1, 1),
        ("postscripts/run.py, scripts/readme and reference.md", 0, 0),
        ("script/x.ts, reference/y.yml", 1, 1),
    ],
)
def test_mentions_of_bundled_files(body, script, reference):
    found = structure_features(body)
    assert (found["mentions a script"], found["mentions a reference file"]) == (script, reference)


def num_calls(function, *arguments):
    """How many functions ran: a measure of work that no busy machine disturbs."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    "unit", ["`", "` ", "[", "![", "[a](", "```\n", "> ", "> a\n", "- ", "- a\n", "1. ", "<", "<a ", "[a]: b\n", "\0"]
)
def test_hostile_text_costs_work_in_proportion_to_its_length(unit):
    structure_features("a")  # the parser is built once
    few, many = (num_calls(structure_features, unit * (length // len(unit))) for length in (2_000, 8_000))
    assert many < 6 * few  # four times the text; quadratic would be 16


def test_comparison_worked_by_hand():
    gold = ["```\na\n```\n# b c scripts/x.py", "a b", "a scripts/x.py"]
    others = ["a", "a b", "a b c d e", "scripts/x.py"]
    compared = {row.feature: row for row in compare_structure(gold, others)}
    words = compared["words"]
    assert (words.gold, words.others, words.num_gold, words.num_others) == (4, 2.5, 3, 4)
    # gold 6, 2, 4 against 1, 2, 5, 3: 6 has more than all 4; 2 more than one, one tie; 4 more than three
    assert words.effect == pytest.approx((4 + 1.5 + 3) / 12)
    assert (compared["mentions a script"].gold, compared["mentions a script"].others) == (2 / 3, 1 / 4)
    assert compared["mentions a script"].effect == pytest.approx((2 * (3 + 0.5) + 0.5 * 3) / 12)
    links = compared["links"]
    assert (links.gold, links.others, links.effect, links.p) == (0, 0, 0.5, 1)


def test_p_is_scipys_adjusted_by_holm():
    gold, others = ["# a\n" * n for n in range(20, 40)], ["# a\n" * n for n in range(15, 30)]
    compared = compare_structure(gold, others)
    raw = mannwhitneyu([*range(20, 40)], [*range(15, 30)], alternative="two-sided").pvalue
    found = {row.feature: row.p for row in compared}
    # headings and words differ alike, and they alone: Holm multiplies the least p by the number of features
    assert found["headings"] == found["words"] == pytest.approx(len(compared) * raw)
    assert {p for name, p in found.items() if name not in ("headings", "words")} == {1}


def test_nothing_to_compare_is_refused():
    with pytest.raises(SkilltrainError, match="no other skills, whose structure"):
        compare_structure(["a"], [])
    with pytest.raises(SkilltrainError, match="no gold skills, whose structure"):
        compare_structure([], ["a"])
