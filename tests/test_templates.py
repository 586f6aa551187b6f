"""Texts that models see: skills cut to their lengths, and queries with their prompts."""

import pytest

from faults import raises
from skilltrain.config import validate
from skilltrain.models.encoder import EncoderConfig
from skilltrain.models.reranker import RerankerConfig
from skilltrain.records import Skill
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate

SKILL = Skill("s", "pod-debug", "Finds why a pod fails", "# Steps\nLook at events")
LONG_SKILL = Skill("s", "n", "说" * 400, "明" * 3000)
UNTRIMMED_SKILL = Skill("s", "n ", "", "b" * 9000)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (SkillTemplate(), "pod-debug | Finds why a pod fails | # Steps\nLook at events"),
        (SkillTemplate(description_chars=5, body_chars=7), "pod-debug | Finds | # Steps"),
        (SkillTemplate(fields="nd"), "pod-debug | Finds why a pod fails"),
        (SkillTemplate(fields="name", description_chars=0), "pod-debug"),
        (SkillTemplate(fields="body", body_chars=7), "# Steps"),
        (
            SkillTemplate(fields="nd", labelled=True),
            "<Name>: pod-debug | <Description>: Finds why a pod fails",
        ),
    ],
)
def test_skill_text_has_chosen_fields(template: SkillTemplate, text: str):
    assert template.render(SKILL) == text


def test_skill_text_is_cut_by_default():
    assert SkillTemplate().render(LONG_SKILL) == "n | " + "说" * 300 + " | " + "明" * 2500


@pytest.mark.parametrize(
    ("template", "skill", "text"),
    [
        (SkillTemplate(), Skill("s", "n", " ", ""), "n"),
        (SkillTemplate(description_chars=0), Skill("s", "n", "d", "b"), "n | b"),
        (SkillTemplate(), Skill("s", "", "", ""), ""),
    ],
)
def test_empty_fields_are_left_out(template: SkillTemplate, skill: Skill, text: str):
    assert template.render(skill) == text


# Encoder ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (EncoderTemplate(), "deploy pods"),
        (EncoderTemplate(query_chars=6), "deploy"),
        (EncoderTemplate(instruction="Find skills"), "Instruct: Find skills\nQuery:deploy pods"),
        (  # NV-Embed has a space after `Query:`
            EncoderTemplate(query_prompt="Instruct: find\nQuery: "),
            "Instruct: find\nQuery: deploy pods",
        ),
    ],
)
def test_query_text_begins_with_prompt(template: EncoderTemplate, text: str):
    assert template.render_query("deploy pods") == text


def test_two_query_prompts_are_refused():
    values = {"source": "x", "template": {"instruction": "find", "query_prompt": "find "}}

    with raises("invalid-setting") as error:
        validate(EncoderConfig, values, "test")

    assert "give 'instruction' or 'query_prompt', not both" in str(error.value)


def test_released_encoder_template():
    values = {"source": "x", "template": "skillrouter_released"}

    template = validate(EncoderConfig, values, "test").template

    assert template is not None
    query_text = template.render_query("q" * 3000)
    assert template.render_skill(UNTRIMMED_SKILL) == f"n  |  | {'b' * 8000}"
    assert query_text.startswith("Instruct: Given a coding task description, retrieve ")
    assert query_text.endswith("task\nQuery:" + "q" * 2000)


def test_unknown_template_name_is_refused():
    values = {"source": "x", "template": "skillrouter"}

    with raises("invalid-setting") as error:
        validate(EncoderConfig, values, "test")

    message = str(error.value)
    assert "template: must be a section of keys (" in message
    assert "found 'skillrouter'" in message


# Reranker ---------------------------------------------------------------------


def test_released_reranker_template():
    values = {"source": "x", "template": "skillrouter_released"}

    template = validate(RerankerConfig, values, "test").template

    assert template is not None
    instruction_start = "<Instruct>: Given a coding task description, judge whether "
    assert template.render_skill(UNTRIMMED_SKILL) == f"n  |  | {'b' * 2000}"
    assert (template.form, template.separator, template.query_chars) == ("yes_no", "\n\n", None)
    assert template.query_prompt().startswith(instruction_start)


def test_yes_no_form_frames_its_texts():
    template = RerankerTemplate(form="yes_no", instruction="Judge it", separator="\n")

    assert template.query_prompt() == "<Instruct>: Judge it\n<Query>: "
    assert template.query_end() == "\n"
    assert template.skill_prompt() == "<Document>: "


def test_pair_form_adds_nothing():
    template = RerankerTemplate()

    assert template.query_prompt() == ""
    assert template.query_end() == ""
    assert template.skill_prompt() == ""


def test_reranker_skill_text_is_cut():
    skill = Skill("s", "n", "d" * 600, "b" * 3000)

    assert RerankerTemplate().render_skill(skill) == f"n | {'d' * 500} | {'b' * 2000}"


def test_structured_reranker_prompt():
    skill = SkillTemplate(labelled=True, separator="\n", body_chars=7)
    template = RerankerTemplate(form="yes_no", skill=skill)

    text = template.skill_prompt() + template.render_skill(Skill("s", "n ", "", "b" * 9))

    assert text == "<Skill>:\n<Name>: n \n<Description>: \n<Body>: bbbbbbb"
