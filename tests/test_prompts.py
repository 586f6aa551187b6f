"""Prompts before queries and skills: free ones, and those in the folders of BGE, E5, GTE and their like."""

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
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, encode_skills, open_encoder
from skilltrain.templates import EncoderTemplate

CPU = torch.device("cpu")
SKILLS = [Skill("a", "pods", "deploy pods", "to find the task"), Skill("b", "chart", "", "table of data")]
QUERIES = ["deploy the pods", "a table"]
NV_EMBED = "Instruct: find the task\nQuery: "
E5 = {"query": "find ", "document": "the "}


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


def test_r3s_query_keeps_its_space():
    template = EncoderTemplate(query_prompt="Instruct: find the task\nQuery: ")
    assert template.render_query("deploy") == "Instruct: find the task\nQuery: deploy"


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


def test_a_prompt_that_is_left_out_of_the_pooling_does_no_harm_where_there_is_none(foreign):
    assert load_encoder(EncoderConfig(source=foreign({}, include_prompt=False)), CPU).settings.pooling == "mean"


def test_an_instruction_and_a_prompt_at_once_are_refused():
    values = {"source": "x", "template": {"instruction": "find", "query_prompt": "find "}}
    with pytest.raises(SkilltrainError, match="give 'instruction' or 'query_prompt', not both"):
        validate(EncoderConfig, values, "test")
