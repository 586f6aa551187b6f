"""Model cards: their programs run, their figures are the run's, and they tell nothing of the machine."""

import hashlib
import json
import re

import numpy as np
import pytest
import torch
import yaml

from skilltrain.export.card import Published, RunRecord, data_steps, model_card, shareable
from skilltrain.export.folder import save_model
from skilltrain.models.encoder import EncoderSettings
from skilltrain.models.pairs import RerankerSettings
from skilltrain.records import Skill
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate
from tiny_models import save_bert

QUERY = "Fill in the tax form and sign it"
SKILLS = [
    Skill("1", "pdf-forms", "Fill in PDF forms", "Read the form's fields, then write the values."),
    Skill("2", "deploy", "Deploy to Kubernetes", "Build the image, then roll it out."),
]
SUMMARY = {
    "num_lists": 32283,
    "num_skills": 51234,
    "num_pairs": 645660,
    "num_positives": 37979,
    "num_parameters": 595776512,
    "num_steps": 2018,
    "num_tokens": 123456789,
    "seconds": 3725.4,
    "last_loss": 0.41237,
    "checkpoint": "step-1900",
    "dev": {"MRR@10": {"mean": 0.6914, "low": 0.6203, "high": 0.7588, "n": 120}},
}


def run_program(card, folder, monkeypatch):
    """The scores that the program of a model's card computes in the model's folder."""
    (program,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(folder)
    names = {}
    exec(program, names)
    return np.asarray(names["scores"])


def record(settings, **facts):
    recipe = {"model": {"source": "owner/base"}} | facts.pop("recipe", {})
    return RunRecord(**{"settings": settings, "recipe": recipe, "summary": {}} | facts)


CUT = SkillTemplate(description_chars=12, body_chars=20, separator=" \n| ")


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("bert", EncoderTemplate(query_prompt="query: ", skill_prompt="passage: ")),
        ("qwen3", EncoderTemplate(instruction="Find", query_chars=15, skill=CUT)),
        (
            "bert_reranker",
            RerankerTemplate(query_chars=9, skill=SkillTemplate(fields="description")),
        ),
        (
            "qwen3_reranker",
            RerankerTemplate(form="yes_no", skill=SkillTemplate(fields="nd", description_chars=7)),
        ),
    ],
)
def test_the_cards_program_gives_our_scores(
    tmp_path, open_encoder_of, open_reranker_of, monkeypatch, name, template
):
    is_encoder = isinstance(template, EncoderTemplate)
    model = (open_encoder_of if is_encoder else open_reranker_of)(name, template=template)
    save_model(model, tmp_path, base=name, card=model_card(record(model.settings)))
    with torch.inference_mode():
        if is_encoder:
            texts = [template.render_skill(skill) for skill in SKILLS]
            vectors = model(model.tokenize(texts, model.settings.max_tokens))
            ours = (model(model.tokenize_queries([QUERY])) @ vectors.T)[0]
        else:
            ours = model(model.tokenize(QUERY, SKILLS))
    found = run_program((tmp_path / "README.md").read_text(encoding="utf-8"), tmp_path, monkeypatch)
    assert np.allclose(found, ours.numpy(), atol=1e-5)


def front_of(card):
    return yaml.safe_load(card.split("---")[1])


def test_the_card_says_what_the_run_says(tmp_path):
    card = model_card(
        record(EncoderSettings(), recipe={"loss": {"name": "infonce"}}, summary=SUMMARY)
    )
    front = front_of(card)
    assert front["library_name"] == "sentence-transformers" and front["base_model"] == "owner/base"
    assert front["pipeline_tag"] == "sentence-similarity" and "agent-skills" in front["tags"]
    for line in (
        "| lists | 32,283 |",
        "| distinct skills | 51,234 |",
        "| positive pairs | 37,979 |",
        "| optimiser steps | 2,018 |",
        "| tokens | 123,456,789 |",
        "| seconds | 3,725 |",
        "| last loss | 0.4124 |",
        "| weights taken after | step-1900 |",
        "| MRR@10 | 0.691 | 0.620 to 0.759 | 120 |",
        "loss:\n  name: infonce\n",
        "untrusted text",
        "--encoder .",
    ):
        assert line in card
    assert (
        "How they were made" not in card
        and "see [its page](https://huggingface.co/owner/base)" in card
    )
    assert "{" not in re.sub(
        r"```.*?```", "", card, flags=re.DOTALL
    )  # nothing of the template is left

    card = model_card(record(RerankerSettings(), exported="step-40", summary={"num_lists": 3}))
    assert (
        front_of(card)["pipeline_tag"] == "text-ranking"
        and "cross-encoder" in front_of(card)["tags"]
    )
    assert "Not evaluated" in card and "checkpoint `step-40`" in card and "| lists | 3 |" in card
    assert (
        "this is a checkpoint of a training" in card
    )  # its steps, tokens and seconds are not known
    assert "--reranker ." in card


def test_a_local_base_is_named_by_its_last_part_and_is_no_model_of_the_hub(tmp_path):
    base = save_bert(tmp_path / "somebody" / "first", reranker=False)
    facts = record(EncoderSettings(), recipe={"model": {"source": str(base)}})
    card = model_card(facts)
    assert "base_model" not in front_of(card)
    assert "`first`" in card and "source: first\n" in card and "somebody" not in card
    assert "Licence: not stated; that of the base: not known." in card
    (base / "README.md").write_text("---\nlicense: mit\n---\n# A base\n")
    assert "Licence: apache-2.0; that of the base: mit." in model_card(
        facts, Published(license="apache-2.0")
    )


def write_record(folder, stage, summary, **inputs):
    """What a stage leaves in its folder; `inputs` maps a setting to the folder that it names."""
    folder.mkdir()
    recipe = {"stage": stage, "data": {}, **{key: str(path) for key, path in inputs.items()}}
    shas = {key: hashlib.sha256(path.name.encode()).hexdigest() for key, path in inputs.items()}
    (folder / "run.json").write_text(
        json.dumps({"recipe": recipe, "inputs": shas, "summary": summary})
    )
    return folder


def test_the_card_tells_how_the_data_were_made(tmp_path):
    pool = write_record(
        tmp_path / "pool",
        "pool",
        {"num_skills": 1234, "num_found": {"a/b|c": 1234}, "seconds": 0.5},
    )
    queries = write_record(
        tmp_path / "queries", "queries", {"num_queries": 80, "dropped": {}}, pool=pool
    )
    dropped = {"dropped_by_layer": {"name": 3, "jaccard": 5}}
    filtered = write_record(tmp_path / "filtered", "filter", dropped, pool=pool, queries=queries)
    lists = write_record(
        tmp_path / "lists", "lists", {"by_source": {"gold": 80}}, queries=queries, rankings=filtered
    )
    run = write_record(tmp_path / "run", "train_encoder", {}, pool=pool, lists=lists)
    steps = data_steps(run)
    assert [(step["stage"], step["counts"]) for step in steps] == [
        ("pool", "num_skills 1,234; num_found: b\\|c 1,234"),
        ("queries", "num_queries 80"),
        ("filter", "dropped_by_layer: name 3, jaccard 5"),
        ("lists", "by_source: gold 80"),
    ]
    card = model_card(record(EncoderSettings(), run=run))
    sha256 = hashlib.sha256(b"filtered").hexdigest()[:16]
    assert (
        f"| filter | filtered | `{sha256}` | dropped_by_layer: name 3, jaccard 5 |\n| lists |"
        in card
    )


def test_what_may_be_published():
    home, windows = "/".join(["", "home", "ada"]), "C:\\Users\\ada\\pool"
    given = {
        "a": "/data/x/pool",
        "b": ["~/runs/one", home, f"{home}/pool", windows, "~ada"],
        "c": "runs/one",
        "api_key": "x",
        "hub_token": "x",
        "max_tokens": 5,
        "token_budget": 6,
        "d": "hf_abcdefghijklmnop",
        "e": "https://ada:secret@host/x",
        "f": None,
        "separator": "/",
        "g": ("\n\n", 0.5, True),
    }
    assert shareable(given) == {
        "a": "pool",
        "b": ["one", "~", "pool", "pool", "~"],
        "c": "runs/one",
        "max_tokens": 5,
        "token_budget": 6,
        "d": "…",
        "e": "https://…host/x",
        "f": None,
        "separator": "/",
        "g": ["\n\n", 0.5, True],
    }
