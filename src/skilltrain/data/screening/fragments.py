"""Access to rules.yaml, which holds the rules and the regular expressions that they share."""

import re
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

_FRAGMENT_REFERENCE = re.compile("<([A-Z_]+)>")


@cache
def load_rules_file() -> dict[str, Any]:
    """Return the sections of rules.yaml: `rules`, `steps` (see `deobfuscate`) and `fragments`."""
    file = files("skilltrain.data.screening") / "rules.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def expand(regex: str) -> str:
    """Return `regex` on one line, with every `<NAME>` replaced by that fragment of rules.yaml."""
    fragments = load_rules_file()["fragments"]
    one_line = "".join(regex.splitlines())
    return _FRAGMENT_REFERENCE.sub(lambda match: expand(fragments[match[1]]), one_line)
