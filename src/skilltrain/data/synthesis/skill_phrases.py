"""A skill's body cut into phrases that can stand in a user's request: no markup, no code, no talk of the skill."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from skilltrain.data.synthesis import phrase_rules as rules

Kind = Literal["ask", "topic", "fact", "quote"]
Tongue = Literal["en", "zh"]

_CJK = re.compile(r"[\u4e00-\u9fff]")
_LATIN_WORD = re.compile(r"[^\W\u4e00-\u9fff]+(?:['’.-][^\W\u4e00-\u9fff]+)*")


@dataclass(frozen=True, slots=True)
class Phrase:
    """A piece of a request: `ask` is what to do (a bare verb phrase), `topic` what it is about (a noun phrase or
    gerund), `fact` a whole sentence, `quote` a request spelled out in the body. `weight` says how apt it is."""

    kind: Kind
    text: str
    weight: float


def num_words(text: str) -> int:
    """Words of a text; two Chinese characters count as one word, which is near the mean length of a Chinese word."""
    return len(_LATIN_WORD.findall(text)) + (len(_CJK.findall(text)) + 1) // 2


def tongue_of(text: str) -> Tongue:
    """`zh` where Chinese characters are more than a quarter of the letters, else `en`."""
    num_chinese = len(_CJK.findall(text))
    return "zh" if num_chinese * 3 > sum(map(str.isalpha, text)) - num_chinese else "en"


def skill_phrases(body: str, tongue: Tongue) -> list[Phrase]:
    """The phrases of a body in `tongue`, in order and without repeats; [] where it holds none (only code, say)."""
    found: dict[str, Phrase] = {}
    for text, weight in _lines(body):
        # In an English request, a letter beyond Latin's is of another script.
        if _CJK.search(text) is None if tongue == "zh" else re.search(r"[\u0250-\u1dff\u2c00-\uffdc]", text):
            continue
        for phrase in _line_phrases(text, weight, tongue):
            found.setdefault(phrase.text.casefold(), phrase)
    return list(found.values())


def _lines(body: str) -> Iterator[tuple[str, float]]:
    """(text without markup, weight of its section) for each paragraph, bullet, table cell and heading."""
    weight, paragraph = 2.0, ""
    body = re.sub(r"^\s*(```|~~~).*?(^\s*\1|\Z)", "\n", body, flags=re.S | re.M)
    body = re.sub(r"<!--.*?-->|^---\n.*?\n---\n", "", body, flags=re.S)
    for line in [*body.splitlines(), ""]:
        bare = line.strip()
        marked = re.match(r"(#{1,6}|[-*+•]|\d+[.)、]|>|\|)\s*(.*)", bare)
        if paragraph and (marked or not bare):
            yield _plain(paragraph), weight
            paragraph = ""
        if marked and marked[1].startswith("#"):
            weight = _weight(marked[2])
            if len(marked[1]) > 1 and weight == 2.0:
                yield _plain(re.sub(r"^[\d.、)]+\s*|^(?:step|phase) \d+:?\s*", "", marked[2], flags=re.I)), 0.3
        elif marked and marked[1] == "|":
            for cell in marked[2].split("|")[:3]:
                yield _plain(cell), weight * 0.2
        elif marked:
            yield _plain(re.sub(r"^\[[ xX]\]", "", marked[2])), weight
        elif bare:
            paragraph = f"{paragraph} {bare}"


def _line_phrases(text: str, weight: float, tongue: Tongue) -> Iterator[Phrase]:
    """The phrases of one line: those between quotation marks, if they are most of it, else its sentences'."""
    quotes = [quote.strip(" ,，") for quote in rules.QUOTED.findall(text)]
    if sum(map(len, quotes)) > 0.6 * len(text):
        for quote in quotes:
            unfit = rules.UNFIT.search(quote) or rules.OPEN_END.search(quote) or re.search(r"\w: ", quote)
            if weight and not unfit and 3 <= num_words(quote) <= 40:
                yield Phrase("quote", quote, weight * 2)
        return
    for piece in re.split(r"(?<=[.!?])\s+(?=[A-Z\"“])|(?<=[。！？；])", text):
        yield from _phrase(piece.strip(), weight, tongue)


def _weight(heading: str) -> float:
    if rules.AGAINST.search(heading):
        return 0.0
    return 4.0 if rules.FOR.search(heading) else 0.1 if rules.ASIDE.search(heading) else 2.0


def _plain(text: str) -> str:
    for pattern, replacement in rules.MARKUP:
        text = pattern.sub(replacement, text)
    kept = (c for c in text if unicodedata.category(c) not in ("So", "Cf", "Co", "Cn") and c != "\ufe0f")
    text = "".join(kept).strip(" -–—:：•*✓✗")
    return re.sub(r"\s+([.,;:!?](?=\s|$)|[。，；：！？])", r"\1", text)


def _phrase(piece: str, weight: float, tongue: Tongue) -> Iterator[Phrase]:
    """The phrase of one sentence, and of its label if it has the form `label: text`."""
    if piece.count('"') % 2 or piece.count("“") != piece.count("”"):
        return
    for pattern, said in rules.ROLES:
        piece = pattern.sub(said, piece)
    if weight == 0.0 or rules.UNFIT.search(piece):
        return
    labelled = rules.LABEL.match(piece)
    if labelled and not piece.endswith("?"):
        yield from _phrase(labelled[2], weight, tongue)
        yield from _phrase(labelled[1], weight * 0.3, tongue)
        return
    piece = re.sub(r"\s*[(（][^()（）]{0,60}[)）]", "", piece)
    if re.search(r"[()（）]", piece):
        return
    if piece.endswith(("?", "？")):
        is_users = weight >= 4 or re.search(r"\b(?:I|my|we|our)\b|我", piece)
        if is_users and 4 <= num_words(piece) <= 40:
            yield Phrase("quote", piece, weight)
        return
    found = _english(piece) if tongue == "en" else _chinese(piece)
    if found and found[1].count('"') % 2 == 0 and found[1].count("“") == found[1].count("”"):
        share = {"ask": 1.0, "fact": 0.5, "topic": 0.3}[found[0]]
        yield Phrase(found[0], found[1], weight * share * (0.15 if rules.VAGUE.search(found[1]) else 1.0))


def _english(piece: str) -> tuple[Kind, str] | None:
    """(kind, text) of an English sentence or fragment, said from the user's side; None where nothing can be made."""
    text = re.split(r"\s[—–]\s|;\s", piece)[0].rstrip(".;,! ")
    wants = rules.WANTS.match(text)
    if rules.OPEN_END.search(text) or (rules.NOT_ASKED.match(text) and not wants):
        return None
    itself = rules.SELF.match(text)
    start = wants or itself or rules.WHEN.match(text)
    rest = text[start.end() :] if start else text
    first, *others = rest.split() or [""]
    verb = None if first.isupper() else _base_form(first.lower())
    if verb and len(others) >= 2 and not rules.NOUN_BEFORE.match(others[0]):
        return ("ask", _from_user(" ".join([verb, *others]))) if len(others) <= 28 else None
    if re.fullmatch(r"[A-Za-z]{2,}ing", first) and 2 <= len(others) <= 20:
        return "topic", _from_user(f"{first.lower()} {' '.join(others)}")
    if re.match(r"You(?!'ll| (?:can|need|want|have|will))", text):
        return None
    if piece.endswith(".") and 7 <= num_words(text) <= 32 and (rules.FINITE.search(text) or num_words(text) >= 10):
        return "fact", _from_user(text) + "."
    rest = text if itself and not wants else rest
    is_clause = verb is not None or (rules.FINITE.search(rest) is not None and not wants)
    if (
        2 <= num_words(rest) <= 10
        and not is_clause
        and not re.search(r"[.!?;:]", rest)
        and not rules.NO_TOPIC.match(rest)
    ):
        return "topic", _from_user(lower_first(rest))
    return None


def _base_form(word: str) -> str | None:
    """The base form of a word that can open a request: itself, or without its third-person ending."""
    for base in (word, word[:-1] if word.endswith("s") else "", word[:-2] if word.endswith("es") else "",
                 word[:-3] + "y" if word.endswith("ies") else ""):  # fmt: skip
        if base in rules.VERBS:
            return base
    return None


def lower_first(text: str) -> str:
    """`text` with a small first letter, unless it opens with an acronym or with a name of several words."""
    first, _, rest = text.partition(" ")
    ordinary = first[1:].islower() and not rest[:1].isupper()
    return text[0].lower() + text[1:] if ordinary else text


def _from_user(text: str) -> str:
    """`text` with you and the user turned into I, me and my."""
    for pattern, said in rules.FROM_USER:
        text = pattern.sub(said, text)
    return text


def _chinese(piece: str) -> tuple[Kind, str] | None:
    """(kind, text) of a Chinese sentence or fragment, said from the user's side; None where nothing can be made."""
    text = piece.strip("。；;，,！! .、")
    if rules.ZH_NOT_ASKED.match(text) and not rules.ZH_WANTS.match(text):
        return None
    start = rules.ZH_WANTS.match(text) or rules.ZH_SELF.match(text)
    rest = rules.ZH_TAIL.sub("", text[start.end() :] if start else text).strip('，,、 的“”"')
    for pattern, said in rules.ZH_FROM_USER:
        rest = pattern.sub(said, rest)
    if not 3 <= num_words(rest) <= 40 or len(_CJK.findall(rest)) < 4:
        return None
    verb = rules.ZH_VERBS.match(rest)
    if verb and not rules.ZH_NOUN.match(rest[verb.end() :]):
        return "ask", rest
    if piece.endswith("。") and num_words(rest) >= 6:
        return "fact", rest + "。"
    return ("topic", rest) if num_words(rest) <= 10 and not verb and not re.search(r"[，,；：]", rest) else None
