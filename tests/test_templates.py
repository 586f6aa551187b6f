"""Texts that models see: skills within their caps, queries with their prompts."""

import pytest

from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import EncoderConfig
from skilltrain.models.reranker import RerankerConfig
from skilltrain.records import Skill
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate

NV_EMBED = "Instruct: find the task\nQuery: "
SKILL = Skill("s", "pod-debug", "Finds why a pod fails", "# Steps\nLook at events")


def test_a_skill_is_name_description_body_within_their_caps():
    assert (
        SkillTemplate().render(SKILL)
        == "pod-debug | Finds why a pod fails | # Steps\nLook at events"
    )
    assert (
        SkillTemplate(description_chars=5, body_chars=7).render(SKILL)
        == "pod-debug | Finds | # Steps"
    )
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
    assert (
        EncoderTemplate(query_prompt=NV_EMBED).render_query("deploy")
        == "Instruct: find the task\nQuery: deploy"
    )
    values = {"source": "x", "template": {"instruction": "find", "query_prompt": "find "}}
    with pytest.raises(SkilltrainError, match="give 'instruction' or 'query_prompt', not both"):
        validate(EncoderConfig, values, "test")


def test_skillrouters_released_templates_by_name():
    encoder = validate(
        EncoderConfig, {"source": "x", "template": "skillrouter_released"}, "test"
    ).template
    reranker = validate(
        RerankerConfig, {"source": "x", "template": "skillrouter_released"}, "test"
    ).template
    assert encoder is not None and reranker is not None
    bare = Skill("s", "n ", "", "b" * 9000)
    assert encoder.render_skill(bare) == f"n  |  | {'b' * 8000}"
    assert encoder.render_query("q" * 3000).startswith(
        "Instruct: Given a coding task description, retrieve "
    )
    assert encoder.render_query("q" * 3000).endswith("task\nQuery:" + "q" * 2000)
    assert reranker.render_skill(bare) == f"n  |  | {'b' * 2000}"
    assert (reranker.form, reranker.separator, reranker.query_chars) == ("yes_no", "\n\n", None)
    assert reranker.query_prompt().startswith(
        "<Instruct>: Given a coding task description, judge whether "
    )
    with pytest.raises(
        SkilltrainError, match=r"template: must be a section of keys \(.*found 'skillrouter'"
    ):
        validate(EncoderConfig, {"source": "x", "template": "skillrouter"}, "test")


def test_the_yes_no_form_frames_query_and_skill_and_the_pair_form_adds_nothing():
    template = RerankerTemplate(form="yes_no", instruction="Judge it", separator="\n")
    frame = template.query_prompt(), template.query_end(), template.skill_prompt()
    assert frame == ("<Instruct>: Judge it\n<Query>: ", "\n", "<Document>: ")
    pair = RerankerTemplate()
    assert (pair.query_prompt(), pair.query_end(), pair.skill_prompt()) == ("", "", "")
    assert (
        pair.render_skill(Skill("s", "n", "d" * 600, "b" * 3000))
        == f"n | {'d' * 500} | {'b' * 2000}"
    )
