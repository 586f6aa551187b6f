"""What of a run's settings may be published."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

_SECRET_KEY = re.compile(r"(^|_)(key|token|secret|password|credentials)$", re.IGNORECASE)
_SECRET = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|AKIA)[\w-]{10,}|(?<=://)[^/\s@]+@")
_HOMES = ("home", "Users")


def shareable(value: Any) -> Any:
    """Settings without keys, and with absolute paths shortened to their last part: they name users and machines."""
    if isinstance(value, Mapping):
        return {key: shareable(item) for key, item in value.items() if not _SECRET_KEY.search(str(key))}
    if isinstance(value, list | tuple):
        return [shareable(item) for item in value]
    return _shortened(_SECRET.sub("…", value)) if isinstance(value, str) else value


def _shortened(text: str) -> str:
    path = PurePosixPath(text) if text.startswith(("/", "~")) else PureWindowsPath(text)
    if not (path.is_absolute() or text.startswith("~")):
        return text
    if len(path.parts) == 1:
        return "~" if text.startswith("~") else text
    return "~" if path.parent.name in _HOMES else path.name
