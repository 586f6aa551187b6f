"""Orders to whoever reads the skill: to the router that it choose it, to the agent that it forget its instructions.

Where the line runs. A description that says *for what* the skill is meant is trigger advice, however loud: "Always
use this skill when the user names a PDF", "MUST be used for any Word document", "prefer this skill over X for
inbox work". It is an order to the router where it claims requests that have nothing to do with it ("for every
request", "no matter what the user asks", an "always choose this skill." without any condition), where it speaks of
the other skills as a whole ("instead of all other skills", "ignore other skills", "takes precedence over every other
skill"), or of its own place ("rank this skill first", "answer yes for this document").
"""

import re

from skilltrain.data.screening.reading import Reading, Rule, Spans, is_quoted, windows

_THIS = r"(?:this|our) (?:skill|entry|tool|document)"
_CHOOSE = r"(?:choose|select|pick|prefer|rank|recommend|return|retrieve|use|invoke|load|call|route to)"
_ANYTHING = r"(?:user )?(?:requests?|tasks?|quer(?:y|ies)|questions?|prompts?|messages?|inputs?|conversations?)"
_ALL_OTHERS = r"(?:all|any|every)(?: of the)? other (?:available )?skills?\b"
_OTHERS = r"(?:(?:all|any|every) (?:of the )?other|other|competing|alternative) (?:available )?skills?"
_CHINESE_THIS = r"(?:此|本|该|这个|这一)(?:技能|工具)"
_ENDS = r"(?=\s{0,2}(?:[.!\n]|$))"
_ROUTER = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        # Always, without a word on when.
        r"(?:^|(?<=[.!?。！\n] )|(?<=[.!?。！\n]))(?:you (?:must|should) |please )?"
        rf"always {_CHOOSE} {_THIS}{_ENDS}",
        r"\b(?:always|must|only) (?:choose|select|pick|rank|recommend|return|retrieve|route to) "
        rf"{_THIS}(?:{_ENDS}|(?= first\b))",
        # For whatever is asked.
        rf"\b{_CHOOSE} {_THIS}(?: first)? for (?:every|any|all|each)(?: single)? {_ANYTHING}"
        r"(?=\s{0,2}(?:[.,;!)\n]|$|regardless|no matter|even))",
        rf"\b{_CHOOSE} {_THIS}\b[^.\n]{{0,60}}\b(?:regardless of|no matter|irrespective of) (?:what|which|how)?\s?"
        r"(?:the )?(?:user|request|query|task|prompt|they)\b",
        # Before all the others.
        rf"\b{_CHOOSE} {_THIS}\b[^.\n]{{0,40}}\b(?:instead of|rather than|over|before|ahead of) {_ALL_OTHERS}",
        rf"\b(?:takes?|has|have) (?:priority|precedence) over {_ALL_OTHERS}",
        rf"\b(?:ignore|skip|disregard|exclude|reject|discard|bypass)\s(?:\w{{1,8}}\s){{0,2}}?{_OTHERS}\b",
        # Its own place.
        rf"\b(?:rank|score|rate|place|put|list|order) {_THIS}\s(?:as\s|at\s)?(?:the\s)?"
        r"(?:first|#1|number one|highest|top|best|most relevant)\b",
        r"\b(?:answer|respond|reply|output|say)\s(?:only\s)?(?:with\s)?[\"'`]?yes[\"'`]? (?:for|to) "
        r"this (?:document|skill)\b",
        r"\bthis (?:document|skill) (?:meets|satisfies|matches|fulfil?ls) (?:the requirements of )?(?:every|any|all) "
        r"(?:query|queries|requests?)\b",
        # The same in Chinese.
        r"(?:^|[。.!\n])\s{0,3}(?:请|你?必须|务必){0,2}(?:总是|始终|永远|一律|无条件)(?:优先)?"
        rf"(?:使用|选择|调用|推荐){_CHINESE_THIS}(?=[。!\n]|$|来?处理(?:所有|任何|一切)(?:任务|请求|问题))",
        r"(?:忽略|跳过|无视|排除)(?:所有|任何|一切)?其(?:他|它)(?:所有)?技能",
        r"(?:不要|禁止|请勿|切勿|不得)(?:使用|选择|调用|推荐)(?:任何)?其(?:他|它)(?:任何)?技能",
        rf"(?:将|把){_CHINESE_THIS}(?:排|放|列)在?(?:第一|首位|最前|榜首)",
        rf"(?:无论|不管)[^。\n]{{0,20}}(?:都|均|一律)(?:必须|要|应)?(?:使用|选择|调用){_CHINESE_THIS}",
    )
)
_NO_OTHERS = re.compile(
    r"(?:never|do not|don't|must not) (?:use|select|choose|pick|route to|consider|load|rank|recommend) (?:any )?"
    r"(?:other|another|different|competing|alternative) skills?\b",
    re.ASCII,
)


_SPOKEN_OF = re.compile(rf"{_THIS}|other (?:available )?skill|{_CHINESE_THIS}|其(?:他|它)", re.ASCII)
_REACH = 160


def _find_router_order(reading: Reading, field: str) -> Spans:
    for start, end in windows(_SPOKEN_OF, reading.plain, _REACH):
        for pattern in (*_ROUTER, _NO_OTHERS):
            for found in pattern.finditer(reading.plain, start, end):
                at = found.end() - len(found[0].lstrip("。.!\n "))
                if not is_quoted(reading, at) and (pattern is not _NO_OTHERS or _claims(reading, found, field)):
                    yield reading.place(at, found.end())


def _claims(reading: Reading, found: re.Match[str], field: str) -> bool:
    """Whether "do not use other skills" claims the choice: it does in a description, or where it speaks of itself.

    A step of a workflow in the body may well name the only skill to go on with.
    """
    near = reading.around(found.start(), found.end(), 120)
    return field != "body" or re.search(rf"{_THIS}|\binstead\b", near) is not None


ROUTER_ORDER = Rule(
    "router_order",
    "orders the router to choose it, whatever is asked, or to pass other skills over",
    ("skill", "this tool", "this document", "this entry", "技能", "工具"),
    _find_router_order,
)

_EARLIER = "(?:之前|以上|先前|前面|上述|此前)(?:的)?"
_EVERYTHING = "(?:所有|全部|一切)(?:的)?"
_CHINESE_ORDERS = "(?:指令|指示|提示词?|规则|说明|设定)"
_FORGET = re.compile(
    r"(?:ignore|disregard|forget)\s(?:(?:all|any|every|the|your|of|these|those|my)\s){0,4}"
    r"(?:previous|prior|above|earlier|preceding|safety|system)\s(?:\w{1,14}\s){0,2}?"
    r"(?:instructions?|prompts?|rules|directions|guidelines|directives|commands|polic(?:y|ies))\b"
    r"|you are now (?:in |an? |the )?(?:\w{1,14} )?(?:unrestricted|developer|maintenance|god|jailbr[eo]a?ke?n?"
    r"|dan|debug|admin|unfiltered|uncensored) mode\b"
    rf"|(?:忽略|无视|忘记|忘掉)(?:你|您)?(?:{_EARLIER}(?:{_EVERYTHING})?|{_EVERYTHING}{_EARLIER}){_CHINESE_ORDERS}",
    re.ASCII,
)
_TELL = r"(?:tell|inform|notify|alert|warn)"
_WHOM = r"(?:the |your )?(?:users?|human|owner|operator)\b"
_HIDE = re.compile(
    rf"(?:not|n't|never)\s{_TELL} {_WHOM}(?=[\s*_]{{0,4}}(?:[.,;!。\n—–]|$|you\b|what\b|this\b|that you\b"
    r"|about (?:this|it|the|what|any)\b|of this\b))"
    r"|(?:not|n't|never)\s(?:mention|reveal|disclose)\b(?! `| (?:\w{1,8} ){0,2}\W?(?:api|key|password|token|secret))"
    rf"[^.,;:\n]{{1,50}}\bto {_WHOM}"
    rf"|(?:hide|conceal|keep) (?:this|it|that)(?: \w{{1,12}}){{0,3}} (?:hidden |secret )?from {_WHOM}"
    r"|(?:不要|请勿|切勿|禁止|不得|别)(?:告诉|告知|通知|透露给)(?:用户|使用者|主人)"
    r"(?=[。.,;!\n*]|$|你|这|此|该|关于)",
    re.ASCII,
)
_ORDER_START = re.compile(r"(?:\b(?:do|must|should) |\bdo)$", re.ASCII)


def _find_override(reading: Reading, field: str) -> Spans:
    for pattern in (_FORGET, _HIDE):
        for found in pattern.finditer(reading.plain):
            verb = _ORDER_START.search(reading.line_before(found.start(), 10))
            start = found.start() - len(verb[0]) if verb else found.start()
            is_order = verb is not None or found[0][:3] != "not"  # "the goal is not to tell", "is not told"
            if is_order and not is_quoted(reading, start):
                yield reading.place(start, found.end())


OVERRIDE_ORDER = Rule(
    "override_order",
    "orders the agent to drop its instructions, or to keep something from its user",
    ("ignore", "disregard", "forget", "you are now", "tell ", "inform", "notify", "alert", "warn", "mention", "reveal",
     "disclose", "hide", "conceal", "keep ", "忽略", "无视", "忘", "告诉", "告知", "通知", "透露"),
    _find_override,
)  # fmt: skip
