"""Filters of skills by their facts, in `Router.route`, `skilltrain route` and the served tools."""

import json

import pytest

from skilltrain.config import validate
from skilltrain.records import Skill
from skilltrain.serving.filters import Filters
from skilltrain.serving.router import Router
from skilltrain.tables import SKILLS, write_table
from small_library import skilltrain, succeeds

OLD = Skill(
    "old",
    "pdf-join",
    "merge pdf files",
    "Use pypdf.",
    license="MIT",
    author="Ada",
    stars=3,
    updated_at="2025-01-31",
    tags=("pdf", "office"),
)
NEW = Skill(
    "new",
    "pdf-glue",
    "merge pdf files",
    "Use pypdf.",
    license="GPL-3.0",
    author="Bob",
    stars=40,
    updated_at="2026-08-03T10:00:00Z",
    tags=("pdf",),
)
BARE = Skill("bare", "pdf-stack", "merge pdf files", "Use pypdf.")
POOL = [OLD, NEW, BARE]
FUSED = [{"kind": "fuse", "of": [{"kind": "lexical"}, {"kind": "lexical", "fields": "body"}]}]


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """The folder of a pool of three skills that suit the same task."""
    folder = tmp_path_factory.mktemp("pool")
    write_table(POOL, SKILLS, folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"old", "new", "bare"}),
        ({"license": "MIT"}, {"old"}),
        ({"license": ["MIT", "GPL-3.0"]}, {"old", "new"}),
        ({"author": "Bob"}, {"new"}),
        ({"tags": ["office", "chart"]}, {"old"}),
        ({"min_stars": 4}, {"new"}),
        ({"updated_since": "2025-01-31"}, {"old", "new"}),
        ({"updated_since": "2025-02-01"}, {"new"}),
        ({"exclude": ["old", "new"]}, {"bare"}),
        ({"tags": "pdf", "min_stars": 40, "exclude": "new"}, set()),
    ],
)
def test_skill_must_pass_every_filter(settings, expected):
    filters = validate(Filters, settings, "test")

    answer = Router(POOL, "lexical").route("merge pdf", 5, filters)

    assert {skill.skill_id for skill in answer.skills} == expected
    assert answer.fits == bool(expected)


@pytest.mark.parametrize("rankers", ["lexical", FUSED])
def test_filters_search_the_whole_pool(rankers):
    crowd = [Skill(f"s{n}", f"pdf-{n}", "merge pdf files", "Use pypdf.") for n in range(300)]
    router = Router([*crowd, OLD], rankers)

    answer = router.route("merge pdf", 1, Filters(license=("MIT",)))

    assert [skill.skill_id for skill in answer.skills] == ["old"]


def test_command_filters_skills(pool):
    command = ("route", "merge pdf", "--pool", pool, "--json")

    rows = json.loads(succeeds(*command, "license=[MIT, GPL-3.0]", "min_stars=10").out)["skills"]

    assert [row["skill_id"] for row in rows] == ["new"]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("license=MITT", "no skill has license=MITT, did you mean 'MIT'? values of license: GPL"),
        ("tags=paper", "no skill has tags=paper; values of tags: office, pdf"),
        ("category=nope", "no skill has category=nope; values of category: none"),
        ("min_stars=50", "no skill passes all of them"),
    ],
)
def test_filters_without_a_skill_are_explained(pool, setting, reason):
    outcome = succeeds("route", "merge pdf", "--pool", pool, setting)

    assert outcome.out.startswith(f"The filters leave no skill: {reason}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("colour=red", "unknown key 'colour'"),
        ("updated_since=soon", "updated_since"),
        ("min_stars=many", "min_stars"),
        ("pdf", "is no setting (settings have the form key=value; put a text with spaces in"),
    ],
)
def test_command_refuses_wrong_filter(pool, setting, message):
    result = skilltrain("route", "merge pdf", "--pool", pool, setting)

    assert message in result.error_line
