"""User requests made from a skill's own body, without any model: sentences chosen, turned to the user's side, framed.

An inverse cloze task (Lee, Chang and Toutanova 2019, arXiv 1906.00300) dressed as a request: the query holds what
the body says about the work, never the description's words as such and never the name.
"""

import random
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

from skilltrain.data.synthesis.name_leak import names_skill
from skilltrain.data.synthesis.skill_phrases import Phrase, Tongue, lower_first, num_words, skill_phrases, tongue_of
from skilltrain.records import Skill

MIN_WORDS, MAX_WORDS = 20, 90

# Frames, by tongue: how a request opens with an ask or a topic, how it goes on, how it ends.
_OPEN_ASK = {
    "en": (
        "I need to {}.", "Please {}.", "Can you {}?", "Help me {}.", "I'm trying to {}.", "Could you {}?",
        "How do I {}?",
        "We have to {} this week.", "What's the best way to {}?", "I want to {}.", "My manager asked me to {}.",
        "I've been asked to {} and don't know where to start.", "For a side project I have to {}.", "{}.",
    ),
    "zh": (
        "我想{}。", "请帮我{}。", "怎么{}？", "能不能{}？", "我需要{}。", "麻烦{}。", "老板让我{}，不知道从哪里下手。",
        "我们团队这周要{}。", "有什么好办法可以{}？", "帮忙{}。", "最近在做一个项目，要{}。",
    ),
}  # fmt: skip
_MORE_ASK = {
    "en": ("Then {}.", "Also {}.", "After that, {}.", "I'd also like to {}.", "Next, {}.",
           "It would help to {} as well.", "Please {} too.", "And {}.", "Make sure to {}."),
    "zh": ("然后{}。", "另外还要{}。", "之后{}。", "同时{}。", "最好也能{}。", "顺便{}。", "还需要{}。"),
}  # fmt: skip
_OPEN_TOPIC = {
    "en": ("I need help with {}.", "I'm working on {}.", "My problem is {}.", "We're stuck on {}.",
           "I have a task: {}.", "What should I know about {}?", "Today's job is {}."),
    "zh": ("我在做{}，需要帮忙。", "关于{}，想请你帮个忙。", "我遇到的问题是{}。", "手头有个任务：{}。",
           "{}该怎么弄？"),
}  # fmt: skip
_MORE_TOPIC = {
    "en": ("It involves {}.", "This is also about {}.", "{}: that matters too.", "There's also {}.",
           "I care about {}.", "It touches {}."),
    "zh": ("涉及{}。", "还有{}。", "{}也很重要。", "重点是{}。", "也包括{}。"),
}  # fmt: skip
_OPEN_FACT = {
    "en": ("{} Can you help me with that?", "{} How would you go about it?",
           "{} I want to do this too.", "{} Where do I begin?"),
    "zh": ("{}这个能帮我弄吗？", "{}具体该怎么做？", "{}我也想这么做。"),
}  # fmt: skip
_MORE_FACT = {
    "en": ("{}", "{}", "{}", "Background: {}", "As far as I know, {}", "Keep in mind: {}"),
    "zh": ("{}", "{}", "背景是：{}", "要注意，{}", "据我了解，{}"),
}  # fmt: skip
_CLOSE = {
    "en": ("Walk me through it step by step.", "Tell me what you need from me.", "Keep it short.",
           "I'd like something I can use today.",
           "Explain what you did afterwards.", "Thanks!", "Any pointers are welcome.", "I'm new to this."),
    "zh": ("请一步一步说明。", "需要我提供什么就告诉我。", "尽量简短一些。", "今天就要用。",
           "做完告诉我结果。", "谢谢！", "我是新手。"),
}  # fmt: skip


def extractive_query(skill: Skill, seed: int) -> str:
    """A request of 20 to 90 words made of phrases of the body; another seed gives another one.

    "" where the body holds too little plain text to say that much without naming the skill.
    """
    chance = random.Random(seed)
    tongue: Tongue = "zh" if skill.lang == "zh" else "en" if skill.lang == "en" else tongue_of(skill.body)
    phrases = [p for p in skill_phrases(skill.body, tongue) if not names_skill(p.text, skill.name)]
    if not phrases:
        tongue = "en" if tongue == "zh" else "zh"
        phrases = [p for p in skill_phrases(skill.body, tongue) if not names_skill(p.text, skill.name)]
    chosen = _choose(phrases, chance)
    text = _frame(chosen, tongue, chance) if chosen else ""
    return text if MIN_WORDS <= num_words(text) <= MAX_WORDS else ""


def repeated_lines(bodies: Iterable[str], min_bodies: int = 3) -> frozenset[int]:
    """Hashes of the lines that stand in `min_bodies` bodies or more: boilerplate, which tells no skill from another."""
    counts: Counter[int] = Counter()
    for body in bodies:
        counts.update({_line_hash(line) for line in body.splitlines() if len(line.strip()) > 12})
    return frozenset(line for line, count in counts.items() if count >= min_bodies)


def without_lines(body: str, lines: frozenset[int]) -> str:
    """`body` without the lines whose hashes are in `lines`; headings stay, for they say what a section is worth."""
    return "\n".join(line for line in body.splitlines() if line.startswith("#") or _line_hash(line) not in lines)


def _line_hash(line: str) -> int:
    return zlib.crc32(line.strip().casefold().encode()) << 12 | len(line.strip()) & 4095


def _choose(phrases: Sequence[Phrase], chance: random.Random) -> list[Phrase]:
    """Phrases drawn by weight until the target length: the one that opens first, the others in the body's order."""
    target = chance.randint(MIN_WORDS, MAX_WORDS - 15)
    # Efraimidis and Spirakis (2006): the largest u^(1/w) are a weighted sample without replacement.
    drawn = sorted(range(len(phrases)), key=lambda i: chance.random() ** (1 / phrases[i].weight), reverse=True)
    if not drawn:
        return []
    opening = min(drawn, key=lambda i: ("ask", "quote", "topic", "fact").index(phrases[i].kind) // 2)
    kept: list[int] = []
    length = num_words(phrases[opening].text)
    for i in drawn:
        size = num_words(phrases[i].text)
        if length >= MIN_WORDS and phrases[i].weight < 0.1:
            continue
        if (
            i != opening
            and length < target
            and length + size <= MAX_WORDS - 20
            and not _repeats(phrases, i, [*kept, opening])
        ):
            kept.append(i)
            length += size + 1
    return [phrases[opening], *(phrases[i] for i in sorted(kept))]


def _repeats(phrases: Sequence[Phrase], i: int, kept: Sequence[int]) -> bool:
    """Whether phrase i says little that the kept ones do not say."""
    words = set(phrases[i].text.casefold().split())
    return any(len(words & set(phrases[k].text.casefold().split())) > 0.6 * len(words) for k in kept)


def _frame(chosen: Sequence[Phrase], tongue: Tongue, chance: random.Random) -> str:
    """The chosen phrases as one text: at most one fact ahead of what is asked, a closing line now and then."""
    opening, *others = chosen
    frames = {"ask": _OPEN_ASK, "topic": _OPEN_TOPIC, "fact": _OPEN_FACT, "quote": _OPEN_FACT}[opening.kind]
    parts = [_fill(chance.choice(frames[tongue]), opening, tongue)]
    facts = [p for p in others if p.kind == "fact"]
    if facts and chance.random() < 0.5:
        others.remove(facts[0])
        parts.insert(0, facts[0].text)
    more = {"ask": _MORE_ASK, "fact": _MORE_FACT, "quote": _MORE_FACT}
    unused = {kind: chance.sample(texts[tongue], len(texts[tongue])) for kind, texts in more.items()}
    for phrase in others:
        if phrase.kind != "topic":
            left = unused[phrase.kind]
            parts.append(_fill(left.pop() if left else chance.choice(more[phrase.kind][tongue]), phrase, tongue))
    if topics := [p.text for p in others if p.kind == "topic"]:
        parts.append(
            _fill(chance.choice(_MORE_TOPIC[tongue]), Phrase("topic", _enumerate(topics, tongue), 1.0), tongue)
        )
    closers = chance.sample(_CLOSE[tongue], 3)
    parts += closers[: chance.random() < 0.4]
    while closers and num_words(_join(parts, tongue)) < MIN_WORDS:
        parts.append(closers.pop())
    return _join(parts, tongue)


def _join(parts: Sequence[str], tongue: Tongue) -> str:
    return ("" if tongue == "zh" else " ").join(parts)


def _enumerate(items: Sequence[str], tongue: Tongue) -> str:
    """`a, b and c`, in the language's own way."""
    comma, last = ("、", "和") if tongue == "zh" else (", ", " and ")
    return last.join([comma.join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _fill(frame: str, phrase: Phrase, tongue: Tongue) -> str:
    """A frame around a phrase; a quoted request stands by itself."""
    text = phrase.text
    if phrase.kind == "quote":
        ending = "" if text[-1] in ".?!。？！" else "。" if tongue == "zh" else "."
        return text[0].upper() + text[1:] + ending
    filled = frame.format(text if frame.startswith("{}") else lower_first(text))
    return filled[0].upper() + filled[1:]
