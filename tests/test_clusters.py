import pytest

from skilltrain.config import validate
from skilltrain.data.near_duplicates import ClustersConfig, name_numbers, run_clusters
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.tables import CLUSTERS, SKILLS, read_table, rows_of, write_table

TEXT = "read the pages of a pdf file and print every one of them to the terminal in order"
TEMPLATE = "Automate {} tasks via Rube MCP. Always search the tools first for current schemas, then plan and execute."
SERVICES = ("brex", "bench", "nasa", "gleap", "zoho", "textit", "wakatime")
POOL = [
    Skill("z/pdf", "pdf", "", TEXT),
    Skill("a/pdf", "pdf-official", "", TEXT + " twice"),
    Skill("m/git", "git", "", "commit all that has changed and push it to the remote"),
    Skill("e/empty", "empty", "", ""),
    *(Skill(f"rube/{service}", f"{service}-automation", "", TEMPLATE.format(service)) for service in SERVICES),
]


@pytest.fixture
def settings(tmp_path):
    write_table(rows_of(POOL), SKILLS, tmp_path / "pool.parquet")
    (tmp_path / "out").mkdir()

    def make(**changes):
        values = {"stage": "clusters", "pool": tmp_path / "pool.parquet", "out": tmp_path / "out"}
        values["workers"] = {"num": 1}
        return validate(ClustersConfig, values | changes, "recipe")

    return make


def clusters_of(out):
    table = read_table(out, CLUSTERS)
    return dict(zip(table.column("skill_id").to_pylist(), table.column("cluster").to_pylist(), strict=True))


def test_copies_share_a_cluster_and_siblings_of_a_template_do_not(settings, tmp_path):
    summary = run_clusters(settings(), tmp_path / "out")
    clusters = clusters_of(tmp_path / "out")
    assert list(clusters) == sorted(skill.skill_id for skill in POOL)
    assert clusters["a/pdf"] == clusters["z/pdf"] == 0
    assert len(set(clusters.values())) == len(POOL) - 1
    assert summary == {
        "num_skills": 11, "num_without_trigrams": 1, "num_clusters": 1, "num_skills_in_clusters": 2,
        "clusters_by_size": {"2": 1, "3 to 5": 0, "6 to 20": 0, "21 to 100": 0, "more": 0},
        "largest": {"a/pdf": 2},
    }  # fmt: skip


def test_plain_trigrams_put_a_template_into_one_cluster(settings, tmp_path):
    summary = run_clusters(settings(max_names=None), tmp_path / "out")
    assert summary["largest"] == {"rube/bench": 7, "a/pdf": 2}
    assert summary["clusters_by_size"] == {"2": 1, "3 to 5": 0, "6 to 20": 1, "21 to 100": 0, "more": 0}


def test_the_order_of_the_pool_and_the_workers_do_not_matter(settings, tmp_path):
    run_clusters(settings(max_names=None), tmp_path / "out")
    expected = clusters_of(tmp_path / "out")
    write_table(rows_of(POOL[::-1]), SKILLS, tmp_path / "pool.parquet")
    run_clusters(settings(max_names=None, workers={"num": 2}), tmp_path / "out")
    assert clusters_of(tmp_path / "out") == expected


def test_an_empty_pool_has_no_clusters(settings, tmp_path):
    write_table([], SKILLS, tmp_path / "pool.parquet")
    summary = run_clusters(settings(), tmp_path / "out")
    assert summary["num_skills"] == summary["num_clusters"] == 0 and summary["largest"] == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"threshold": 0}, "threshold"), ({"threshold": 60}, "threshold"), ({"max_names": 0}, "max_names")],
)
def test_settings_that_cannot_work_are_refused(settings, changes, message):
    with pytest.raises(SkilltrainError, match=message):
        settings(**changes)


def test_a_pool_that_is_not_there_is_named(settings, tmp_path):
    (tmp_path / "pool.parquet").unlink()
    with pytest.raises(SkilltrainError, match=r"pool\.parquet: no skills table here"):
        run_clusters(settings(), tmp_path / "out")


def test_names_are_numbered_without_case_and_separators():
    numbers = name_numbers(["PDF-Tools", "git", "pdf_tools", "--", ""])
    assert numbers[0] == numbers[2] != numbers[1] and numbers[3] == numbers[4] == -1
