"""`skilltrain lint` names the faults of skills, the pairs that collide, and what to do."""

import json

import pytest

from skilltrain.serving.lint import lint
from small_library import skilltrain, succeeds

GOOD = {
    "pdf-merge": "Merge PDF files into one document. Use when pages must be joined.",
    "log-search": "Search the logs of a cluster. Use when a request has failed.",
    "photo-sort": "Sort photos by place and day. Use when a trip is over.",
}
BODIES = {
    "pdf-merge": "Read the pages of every PDF file and write one document.",
    "log-search": "Filter the log lines of a cluster by request and count failed ones.",
    "photo-sort": "Read the place and the day of each photo and make folders of trips.",
}


def write(folder, name, text):
    """Write a SKILL.md."""
    file = folder / name / "SKILL.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def skill_text(name, description, body):
    """Return a SKILL.md."""
    return f"---\nname: {name}\ndescription: {description}\n---\n{body}\n"


@pytest.fixture
def skills(tmp_path):
    """Return a folder of three skills without a fault."""
    for name, description in GOOD.items():
        write(tmp_path / "skills", name, skill_text(name, description, BODIES[name]))
    return tmp_path / "skills"


def findings_of(folder):
    """Return the id, the rule and the other id of each finding."""
    return [(finding.skill_id, finding.rule, finding.other_id) for finding in lint(folder)]


def test_good_skills_have_no_finding(skills):
    outcome = succeeds("lint", skills)

    assert outcome.out == "0 findings\n"


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("Mend a bicycle when it is broken.", ["front_matter"]),
        ("---\nname: bike\n", ["front_matter"]),
        (
            "---\nname: bike\ndescription: Mend a bicycle: use when it breaks.\n---\nTurn it.",
            ["front_matter"],
        ),
        ("---\nname: bike\n---\nMend a bicycle when it is broken.", ["no_description"]),
        (skill_text("bike", "Use when bikes break.", "Turn the bike."), ["vague_description"]),
        (skill_text("bike", "Mend the tyres of a bicycle.", "Bicycle tyres."), ["no_trigger"]),
        (
            skill_text("bike", "Mend a bicycle when it breaks.", "See http://45.140.17.2/x"),
            ["bare_address"],
        ),
    ],
)
def test_fault_has_its_rule(skills, text, rules):
    write(skills, "bike", text)

    findings = [finding for finding in lint(skills) if finding.skill_id == "bike"]
    assert [finding.rule for finding in findings] == rules
    assert all(finding.fix for finding in findings)


def test_unreadable_file_is_named(skills):
    (skills / "bike").mkdir()
    (skills / "bike" / "SKILL.md").write_bytes(b"\x00\x01\x02" * 50)

    (finding,) = lint(skills)
    assert (finding.skill_id, finding.rule) == ("bike", "not_text")
    assert finding.fix == "correct the file, or remove it"


def test_yaml_fault_has_its_line(skills):
    write(skills, "bike", "---\nname: bike\ndescription: Mend it: now.\n---\nTurn it.")

    (finding,) = lint(skills)

    assert "no YAML: mapping values are not allowed here at line 3" in finding.problem


def test_copies_are_named_once(skills):
    body = "Turn the bicycle over, take the wheel out and look for the hole. " * 2
    for name, use in {"bike": "a tyre is flat", "cycle": "a wheel has lost its air"}.items():
        write(skills, name, skill_text(name, f"Mend bicycle tyres. Use when {use}.", body))

    assert findings_of(skills) == [("cycle", "near_duplicate", "bike")]


def test_collision_names_the_pair(skills):
    description = "Merge PDF files and write one document. Use when pages must be joined."
    write(skills, "paper-tool", skill_text("paper-tool", description, "Print it on both sides."))

    (finding,) = lint(skills)

    assert (finding.skill_id, finding.rule) == ("paper-tool", "collision")
    assert finding.other_id == "pdf-merge"
    assert "document" in finding.fix


def test_skill_without_description_leads_nowhere(skills):
    write(skills, "empty-tool", "---\nname: empty-tool\n---\n```\nx\n```\n")

    rules = {rule for _, rule, _ in findings_of(skills)}

    assert rules and "collision" not in rules


def test_skill_for_users_is_no_finding(skills):
    text = skill_text("ship", "Ship the build when it is green.\ndisable-model-invocation: on", "x")
    write(skills, "ship", text)

    assert findings_of(skills) == []


def test_findings_end_with_exit_code_one(skills):
    write(skills, "bike", skill_text("bike", "Mend the tyres of a bicycle.", "Bicycle tyres."))

    text = skilltrain("lint", skills)
    as_json = skilltrain("lint", skills, "--json")

    (finding,) = json.loads(as_json.out)["findings"]
    assert (text.code, as_json.code) == (1, 1)
    assert text.out.startswith("bike: no_trigger: the description does not say when")
    assert finding["rule"] == "no_trigger"
