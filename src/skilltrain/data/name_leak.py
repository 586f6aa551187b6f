"""Does a query name its skill? Such a query teaches a model to match names, not needs (SkillRouter, section 4.1)."""

import re
from itertools import accumulate

from skilltrain.texts import CJK, words_of

_IS_LATIN = re.compile(rf"[^{CJK}]")


def names_skill(query: str, name: str) -> bool:
    """Whether whole consecutive words of `query` spell `name`, whatever the case and the separators.

    `web-scraper` is named by "Web Scraper", "web_scraper", "WebScraper" and "webscraper", but not by
    "webscrapers" or "scrape the web"; `pdf` is named by "a PDF", not by "pdfs". Single-word names count like any
    other, common or not.
    """
    spelled = "".join(words_of(name))
    if not spelled:
        return bool(name.strip()) and name.strip() in query
    words = words_of(query)
    starts = list(accumulate(map(len, words), initial=0))
    text = "".join(words)
    return any(text.startswith(spelled, start) and start + len(spelled) in starts for start in starts)


def without_name(text: str, name: str) -> str:
    """`text` without the words that spell `name`, as `names_skill` finds them in plain letters."""
    parts = words_of(name)
    if not parts:
        return text
    spelled = r"[\W_]*".join(map(re.escape, "".join(parts) if len(parts) == 1 else parts))
    before = rf"(?<![^\W_{CJK}])" if _IS_LATIN.match(parts[0]) else ""
    after = rf"(?![^\W_{CJK}])" if _IS_LATIN.match(parts[-1]) else ""
    return " ".join(re.sub(f"{before}(?i:{spelled}){after}", " ", text).split())
