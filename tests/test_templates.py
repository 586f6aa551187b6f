"""Texts that models see: skills within their caps, and prompts, free or from the folders of BGE, E5 and their like."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.export.folder import save_model
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.reranker import RerankerConfig
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, encode_skills, open_encoder
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate

CPU = torch.device("cpu")
SKILLS = [Skill("a", "pods", "deploy pods", "to find the task"), Skill("b", "chart", "", "table of data")]
QUERIES = ["deploy the pods", "a table"]
NV_EMBED = "Instruct: find the task\nQuery: "
E5 = {"query": "find ", "document": "the "}
SKILL = Skill("s", "pod-debug", "Finds why a pod fails", "# Steps\nLook at events")


@pytest.fixture
def foreign(tmp_path, model_folders):
    """prompts, and settings of the pooling → a folder that sentence-transformers wrote, with these prompts."""

    def write(prompts, default=None, **pooling) -> str:
        folder = tmp_path / "foreign"
        shutil.rmtree(folder, ignore_errors=True)
        SentenceTransformer(str(model_folders["bert"]), device="cpu").save(str(folder))
        for file, values in (
            (folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": default}),
            (folder / "1_Pooling" / "config.json", pooling),
        ):
            file.write_text(json.dumps(json.loads(file.read_text()) | values))
        return str(folder)

    return write


def texts_of(encoder):
    return [encoder.settings.template.skill.render(skill) for skill in SKILLS]


def vectors_of(encoder):
    """(of the queries, of the skills), by the ways that training and retrieval go."""
    skills = [text for skill in SKILLS for text in encoder.settings.chunk_texts(skill)]
    ids = encoder.tokenize_queries(QUERIES), encoder.tokenize(skills, encoder.settings.max_tokens)
    with torch.inference_mode():
        return tuple(map(encoder, ids))


@pytest.mark.parametrize(
    ("prompts", "default"),
    [
        (E5, None),
        ({"query": NV_EMBED}, "query"),  # the default is for texts of neither kind
        ({"query": None, "document": "the "}, None),
        ({"query": "find ", "document": "", "passage": "the "}, None),
        ({"other": "the "}, "other"),
        ({}, None),
    ],
    ids=str,
)
def test_a_foreign_folders_prompts_give_the_vectors_of_sentence_transformers(foreign, prompts, default):
    folder = foreign(prompts, default)
    plain = SentenceTransformer(folder, device="cpu")
    encoder = load_encoder(EncoderConfig(source=folder), CPU)
    queries, skills = vectors_of(encoder)
    options = {"convert_to_tensor": True, "normalize_embeddings": True}
    assert torch.allclose(queries, plain.encode_query(QUERIES, **options), atol=1e-5)
    assert torch.allclose(skills, plain.encode_document(texts_of(encoder), **options), atol=1e-5)
    assert encoder.settings.template.before_query() == (prompts.get("query") or "")
    served = open_encoder(EncoderSource(source=folder, precision="float32", cache=None))
    assert torch.allclose(torch.from_numpy(encode_skills(served, SKILLS)), skills, atol=1e-5)


def test_a_prompt_stored_as_passage_stands_before_skills(foreign):
    """sentence-transformers 6.2 takes it when it is named, and forgets it when it is not."""
    folder = foreign({"query": "find ", "passage": "the "})
    encoder, plain = load_encoder(EncoderConfig(source=folder), CPU), SentenceTransformer(folder, device="cpu")
    named = plain.encode_document(texts_of(encoder), prompt_name="passage", convert_to_tensor=True)
    assert torch.allclose(vectors_of(encoder)[1], torch.nn.functional.normalize(named, dim=1), atol=1e-5)


@pytest.mark.parametrize(
    ("template", "query", "skill"),
    [
        ({"skill": {"body_chars": 9}}, "find ", "the "),
        ({"query_prompt": "a "}, "a ", "the "),
        ({"query_prompt": "", "skill_prompt": ""}, "", ""),
        ({"instruction": "find the task"}, "Instruct: find the task\nQuery:", "the "),
        ({"query_prompt": NV_EMBED, "skill_prompt": "to "}, NV_EMBED, "to "),
    ],
)
def test_what_a_recipe_says_of_prompts_goes_before_what_the_folder_says(foreign, template, query, skill):
    config = validate(EncoderConfig, {"source": foreign(E5), "template": template}, "test")
    for given in (config, validate(EncoderConfig, config.model_dump(), "a run's own record")):
        found = load_encoder(given, CPU).settings.template
        assert (found.render_query("x"), found.skill_prompt or "") == (query + "x", skill)
        assert found.render_skill(SKILLS[1]).startswith(skill + "chart")


def test_prompts_go_with_a_trained_model_and_into_what_it_exports(tmp_path, foreign):
    encoder = load_encoder(EncoderConfig(source=foreign(E5)), CPU)
    save_model(encoder, tmp_path / "saved", base="bert")
    assert load_encoder(EncoderConfig(source=str(tmp_path / "saved")), CPU).settings == encoder.settings
    plain = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert plain.prompts == E5
    assert torch.allclose(plain.encode_document(texts_of(encoder), convert_to_tensor=True), vectors_of(encoder)[1])


@pytest.mark.parametrize(
    ("prompts", "pooling", "message"),
    [
        (["query: "], {}, "prompts: must be a valid dictionary"),
        ({"query": 3}, {}, "prompts.query: must be a valid string"),
        (E5, {"include_prompt": False}, "its pooling leaves the prompt out"),
    ],
)
def test_prompts_that_cannot_be_followed_are_one_line(foreign, prompts, pooling, message):
    folder = foreign(E5, **pooling)
    file = Path(folder) / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": prompts}))
    with pytest.raises(SkilltrainError, match=message):
        load_encoder(EncoderConfig(source=folder), CPU)
    harmless = EncoderConfig(source=foreign({}, include_prompt=False))  # where there is no prompt to leave out
    assert load_encoder(harmless, CPU).settings.pooling == "mean"


# Without a model -----------------------------------------------------------------------------------------------------


def test_a_skill_is_name_description_body_within_their_caps():
    assert SkillTemplate().render(SKILL) == "pod-debug | Finds why a pod fails | # Steps\nLook at events"
    assert SkillTemplate(description_chars=5, body_chars=7).render(SKILL) == "pod-debug | Finds | # Steps"
    assert SkillTemplate(fields="nd").render(SKILL) == "pod-debug | Finds why a pod fails"
    assert SkillTemplate(fields="name", description_chars=0).render(SKILL) == "pod-debug"
    assert SkillTemplate(fields="body", body_chars=7).render(SKILL) == "# Steps"
    assert SkillTemplate().render(Skill("s", "n", " ", "")) == "n"
    assert SkillTemplate(description_chars=0).render(Skill("s", "n", "d", "b")) == "n | b"
    assert SkillTemplate().render(Skill("s", "", "", "")) == ""
    skill = Skill("s", "n", "说" * 400, "明" * 3000)
    assert SkillTemplate().render(skill) == "n | " + "说" * 300 + " | " + "明" * 2500


def test_the_encoder_sees_no_space_after_query_unless_its_prompt_says_so():
    template = EncoderTemplate(instruction="Find skills", query_chars=6)
    assert template.render_query("deploy pods") == "Instruct: Find skills\nQuery:deploy"
    assert EncoderTemplate().render_query("deploy pods") == "deploy pods"
    assert EncoderTemplate(query_prompt=NV_EMBED).render_query("deploy") == "Instruct: find the task\nQuery: deploy"
    values = {"source": "x", "template": {"instruction": "find", "query_prompt": "find "}}
    with pytest.raises(SkilltrainError, match="give 'instruction' or 'query_prompt', not both"):
        validate(EncoderConfig, values, "test")


def test_skillrouters_released_templates_by_name():
    encoder = validate(EncoderConfig, {"source": "x", "template": "skillrouter_released"}, "test").template
    reranker = validate(RerankerConfig, {"source": "x", "template": "skillrouter_released"}, "test").template
    assert encoder is not None and reranker is not None
    bare = Skill("s", "n ", "", "b" * 9000)
    assert encoder.render_skill(bare) == f"n  |  | {'b' * 8000}"
    assert encoder.render_query("q" * 3000).startswith("Instruct: Given a coding task description, retrieve ")
    assert encoder.render_query("q" * 3000).endswith("task\nQuery:" + "q" * 2000)
    assert reranker.render_skill(bare) == f"n  |  | {'b' * 2000}"
    assert "\n\n<Query>: " + "q" * 3000 + "\n\n<Document>: " in reranker.render_query("q" * 3000)
    with pytest.raises(SkilltrainError, match=r"template: must be a section of keys \(.*found 'skillrouter'"):
        validate(EncoderConfig, {"source": "x", "template": "skillrouter"}, "test")


@pytest.mark.parametrize("separator", ["\n", "\n\n"])
def test_the_yes_no_form(separator):
    template = RerankerTemplate(form="yes_no", instruction="Judge it", separator=separator, query_chars=6)
    text = template.render_query("deploy pods") + template.render_skill(SKILL)
    parts = ["<Instruct>: Judge it", "<Query>: deploy", "<Document>: " + SkillTemplate().render(SKILL)]
    assert text == separator.join(parts)


def test_the_pair_form_adds_nothing():
    assert RerankerTemplate().render_query("deploy pods") == "deploy pods"
    assert RerankerTemplate().render_skill(Skill("s", "n", "d" * 600, "b" * 3000)) == f"n | {'d' * 500} | {'b' * 2000}"
