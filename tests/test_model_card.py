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
    "num_lists": 32283, "num_skills": 51234, "num_pairs": 645660, "num_positives": 37979, "num_parameters": 595776512,
    "num_steps": 2018, "num_tokens": 123456789, "seconds": 3725.4, "last_loss": 0.41237, "checkpoint": "step-1900",
    "dev": {"MRR@10": {"mean": 0.6914, "low": 0.6203, "high": 0.7588, "n": 120}},
}  # fmt: skip


def program_in(card):
    (program,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return program


def run_program(card, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {}
    exec(program_in(card), names)
    return np.asarray(names["scores"])


def record(settings, **facts):
    return RunRecord(**{"settings": settings, "base": "owner/base", "recipe": {}, "summary": {}} | facts)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_the_encoders_program_gives_our_scores(tmp_path, open_encoder_of, monkeypatch, name):
    skill = SkillTemplate(description_chars=12, body_chars=20, separator=" \n| ")
    encoder = open_encoder_of(name, template=EncoderTemplate(instruction="Find", query_chars=15, skill=skill))
    card = model_card(record(encoder.settings))
    save_model(encoder, tmp_path, base=name, card=card)
    texts = [encoder.settings.template.skill.render(skill) for skill in SKILLS]
    with torch.inference_mode():
        vectors = encoder(encoder.tokenize(texts, encoder.settings.max_tokens))
        ours = encoder(encoder.tokenize_queries([QUERY])) @ vectors.T
    found = run_program((tmp_path / "README.md").read_text(encoding="utf-8"), tmp_path, monkeypatch)
    assert np.allclose(found, ours[0].numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("bert_reranker", RerankerTemplate(query_chars=9, skill=SkillTemplate(fields="description"))),
        ("bert", RerankerTemplate(form="cosine_pair")),
        ("qwen3_reranker", RerankerTemplate(form="yes_no", skill=SkillTemplate(fields="nd", description_chars=7))),
    ],
)
def test_the_rerankers_program_gives_our_scores(tmp_path, open_reranker_of, monkeypatch, name, template):
    reranker = open_reranker_of(name, template=template)
    save_model(reranker, tmp_path, base=name, card=model_card(record(reranker.settings)))
    with torch.inference_mode():
        ours = reranker(reranker.tokenize(QUERY, SKILLS)).numpy()
    found = run_program((tmp_path / "README.md").read_text(encoding="utf-8"), tmp_path, monkeypatch)
    assert np.allclose(found, ours, atol=1e-5)


def test_the_card_says_what_the_run_says():
    card = model_card(record(EncoderSettings(), recipe={"loss": {"name": "infonce"}}, summary=SUMMARY))
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "sentence-transformers" and front["base_model"] == "owner/base"
    assert front["pipeline_tag"] == "sentence-similarity" and "agent-skills" in front["tags"]
    for line in (
        "| lists | 32,283 |", "| distinct skills | 51,234 |", "| positive pairs | 37,979 |",
        "| optimiser steps | 2,018 |",
        "| tokens | 123,456,789 |", "| seconds | 3,725 |", "| last loss | 0.4124 |",
        "| weights taken after | step-1900 |",
        "| MRR@10 | 0.691 | 0.620 to 0.759 | 120 |", "loss:\n  name: infonce\n", "untrusted text", "--encoder .",
    ):  # fmt: skip
        assert line in card


def test_a_reranker_is_tagged_as_one_and_what_is_not_known_is_said():
    card = model_card(record(RerankerSettings(), exported="step-40", summary={"num_lists": 3}))
    front = yaml.safe_load(card.split("---")[1])
    assert front["pipeline_tag"] == "text-ranking" and "cross-encoder" in front["tags"]
    assert "Not evaluated" in card and "checkpoint `step-40`" in card and "| lists | 3 |" in card
    assert "this is a checkpoint of a training" in card  # its steps, tokens and seconds are not known
    assert "--reranker ." in card


def test_a_local_base_is_named_by_its_last_part_and_is_no_model_of_the_hub(tmp_path):
    base = tmp_path / "somebody" / "runs" / "first"
    card = model_card(record(EncoderSettings(), base=str(base), recipe={"model": {"source": str(base)}}))
    assert "base_model" not in yaml.safe_load(card.split("---")[1])
    assert "`first`" in card and "source: first\n" in card and "somebody" not in card


def write_record(folder, stage, summary, **inputs):
    """What a stage leaves in its folder; `inputs` maps a setting to the folder that it names."""
    folder.mkdir()
    recipe = {"stage": stage, "data": {}, **{key: str(path) for key, path in inputs.items()}}
    shas = {key: hashlib.sha256(path.name.encode()).hexdigest() for key, path in inputs.items()}
    (folder / "run.json").write_text(json.dumps({"recipe": recipe, "inputs": shas, "summary": summary}))
    return folder


def test_the_card_tells_how_the_data_were_made(tmp_path):
    pool = write_record(tmp_path / "pool", "pool", {"num_skills": 1234, "num_found": {"a/b|c": 1234}, "seconds": 0.5})
    queries = write_record(tmp_path / "queries", "queries", {"num_queries": 80, "dropped": {}}, pool=pool)
    dropped = {"dropped_by_layer": {"name": 3, "jaccard": 5}}
    filtered = write_record(tmp_path / "filtered", "filter", dropped, pool=pool, queries=queries)
    lists = write_record(tmp_path / "lists", "lists", {"by_source": {"gold": 80}}, queries=queries, rankings=filtered)
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
    assert f"| filter | filtered | `{sha256}` | dropped_by_layer: name 3, jaccard 5 |\n| lists |" in card
    assert "How they were made" not in model_card(record(EncoderSettings()))


def test_licences_are_stated_or_said_to_be_unknown(tmp_path):
    base = save_bert(tmp_path / "base", reranker=False)
    assert "Licence: not stated; that of the base: not known." in model_card(record(EncoderSettings(), base=str(base)))
    (base / "README.md").write_text("---\nlicense: mit\n---\n# A base\n")
    card = model_card(record(EncoderSettings(), base=str(base)), Published(license="apache-2.0"))
    assert "Licence: apache-2.0; that of the base: mit." in card
    assert "see [its page](https://huggingface.co/owner/base)" in model_card(record(EncoderSettings()))
    assert "{" not in re.sub(r"```.*?```", "", card, flags=re.DOTALL)  # nothing of the template is left


def test_what_may_be_published():
    home, windows = "/".join(["", "home", "ada"]), "C:\\Users\\ada\\pool"
    given = {
        "a": "/data/x/pool", "b": ["~/runs/one", home, f"{home}/pool", windows, "~ada"], "c": "runs/one",
        "api_key": "x", "hub_token": "x", "max_tokens": 5, "token_budget": 6, "d": "hf_abcdefghijklmnop",
        "e": "https://ada:secret@host/x", "f": None, "separator": "/", "g": ("\n\n", 0.5, True),
    }  # fmt: skip
    assert shareable(given) == {
        "a": "pool", "b": ["one", "~", "pool", "pool", "~"], "c": "runs/one", "max_tokens": 5, "token_budget": 6,
        "d": "…", "e": "https://…host/x", "f": None, "separator": "/", "g": ["\n\n", 0.5, True],
    }  # fmt: skip
