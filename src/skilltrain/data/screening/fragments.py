"""The file rules.yaml: rules, steps of unfolding, and the fragments that their expressions share."""

import re
from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@cache
def load_rules_file() -> dict[str, Any]:
    """Return rules.yaml: `rules`, `steps` (see `unfold`) and `fragments` (expression by name)."""
    file = files("skilltrain.data.screening") / "rules.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def expand(regex: str) -> str:
    """Return `regex` on one line, with every `<NAME>` replaced by that fragment of rules.yaml."""
    fragments = load_rules_file()["fragments"]
    one_line = "".join(regex.splitlines())
    return re.sub("<([A-Z_]+)>", lambda match: expand(fragments[match[1]]), one_line)
