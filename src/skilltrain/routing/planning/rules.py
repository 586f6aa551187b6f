"""A task cut into steps by rules of English and Chinese: the floor that needs no model.

Sentences and list items are cut, then clauses: at words of order (then, finally, 然后), and where "and" or a comma
stands before a verb of action. What holds neither such a verb nor a question is the task's setting and no step.
"""

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from skilltrain.config import Config
from skilltrain.texts import one_line

_VERBS = (
    "add|alert|analyse|analyze|annotate|append|archive|arrange|ask|assess|audit|backup|benchmark|book|build|buy|"
    "calculate|call|capture|categorize|chart|check|clean|collect|combine|compare|compile|compose|compress|compute|"
    "configure|convert|copy|count|crawl|create|crop|cut|debug|delete|deliver|deploy|describe|design|detect|determine|"
    "diagnose|discover|display|download|draft|draw|edit|email|embed|encode|encrypt|estimate|evaluate|examine|execute|"
    "explain|explore|export|extract|fetch|figure|fill|filter|find|fix|forecast|format|gather|generate|geocode|get|"
    "give|grab|group|identify|import|index|inform|insert|inspect|install|integrate|introduce|investigate|keep|label|"
    "launch|learn|let|list|load|locate|look|make|manage|map|mark|measure|merge|migrate|modify|monitor|move|normalize|"
    "notify|obtain|open|optimize|organize|outline|parse|pick|ping|plan|play|plot|post|predict|prepare|present|print|"
    "process|produce|provide|publish|pull|push|put|query|rank|read|recommend|record|refactor|remind|remove|rename|"
    "render|replace|reply|report|request|research|reserve|resize|retrieve|review|rewrite|run|save|scan|schedule|"
    "scrape|search|see|select|send|set|share|show|simulate|solve|sort|split|start|stop|store|stream|suggest|"
    "summarise|summarize|sync|tag|tell|test|tidy|track|train|transcribe|transfer|transform|translate|trim|turn|"
    "update|upload|use|validate|verify|view|visit|visualize|watch|work|write"
)
_ZH_VERBS = (
    "查找|查询|查看|搜索|检索|获取|下载|抓取|爬取|读取|阅读|提取|收集|生成|创建|制作|绘制|撰写|编写|编辑|翻译|总结|"
    "汇总|归纳|分析|比较|对比|计算|统计|转换|转成|转为|保存|导出|导入|上传|发送|发给|发到|发布|通知|提醒|部署|运行|"
    "执行|测试|检查|验证|监控|推荐|规划|安排|预订|整理|合并|拆分|压缩|打开|列出|给出|告诉|显示|展示|训练|标注|识别|"
    "更新|删除|添加|设置|配置|备份|查|画|写|存|找|做|用"
)
_VERB = rf"(?:re-?)?(?:{_VERBS})\b"
_ZH_VERB = f"(?:{_ZH_VERBS}|[把将用给])"
_START = rf"(?=(?:(?:also|please|finally|lastly|then|next|automatically)\s+)*{_VERB})"
_SENTENCE = re.compile(
    r"(?:(?<=[.!?;:])\s+|[。！？；]|\n)+(?:(?:[-*•]|\d+[.)、])\s*)?|^\s*(?:[-*•]|\d+[.)、])\s+", re.M
)
_ORDER = re.compile(
    r"[,;]?\s*\b(?:and\s+then|and\s+finally|after\s+(?:that|which)|afterwards|followed\s+by|once\s+done|"
    rf"then|finally|lastly|next(?=\s*,))\b\s*,?\s*|\s*[,;&]?\s*\band\s+{_START}|\s*[,;&]\s*{_START}"
    rf"|[，,、]?\s*(?:然后|接着|随后|之后|并且|最后|同时|再(?={_ZH_VERB})|并(?={_ZH_VERB}))\s*[，,]?|[，,]\s*(?={_ZH_VERB})",
    re.I,
)
_AFTER = re.compile(r"^(?:after|once|when)\s+(.{8,}?),\s+(.{8,})$|^(.{8,}?)\s+after\s+(\w+ing\b.{4,})$", re.I)
_BEFORE = re.compile(r"^(?:before)\s+(.{8,}?),\s+(.{8,})$|^(.{8,}?)\s+before\s+(\w+ing\b.{4,})$", re.I)
_OPENING = re.compile(
    r"^(?:(?:first(?:ly)?|second(?:ly)?|third(?:ly)?|then|next|finally|lastly|also|and|now|please|so|start\s+by|"
    r"(?:can|could|would)\s+you(?:\s+please)?|i\s+(?:want|need|would\s+like|'d\s+like)\s+(?:you\s+)?to|help\s+me(?:\s+to)?|"
    r"let's|we\s+need\s+to)\b[,:]?\s*|(?:请|帮我|首先|先|我想要?|我要|需要|然后|并|再|最后)[，,]?\s*)+",
    re.I,
)  # fmt: skip
_ASKS = r"^(?:what|how|which|who|where|why|\w{3,}ing)\b|\bI\s+(?:need|want)\b|[什怎如哪]\w"
_ACTS = re.compile(rf"\b{_VERB}|{_ZH_VERB}|{_ASKS}", re.I)


@dataclass(frozen=True, slots=True)
class Draft:
    """A task cut into steps.

    `after` names, for each step, the steps that it needs, counted from 0; None where nobody said. `chosen` are skill
    ids, one a step, where a model chose them itself.
    """

    texts: tuple[str, ...]
    after: tuple[tuple[int, ...], ...] | None = None
    chosen: tuple[str, ...] = ()


class RulesConfig(Config):
    """Steps by rules of English and Chinese; no model."""

    kind: Literal["rules"] = "rules"
    max_steps: int = Field(default=20, ge=1, description="later steps are left out")


class WholeConfig(Config):
    """The whole task as one step, to see what cutting it adds."""

    kind: Literal["whole"] = "whole"


def draft_without_model(config: RulesConfig | WholeConfig, task: str) -> Draft:
    """The steps of `task` by one of the two."""
    return Draft((one_line(task),)) if isinstance(config, WholeConfig) else draft_by_rules(task, config.max_steps)


def draft_by_rules(task: str, max_steps: int) -> Draft:
    """The steps of `task` in order, at most `max_steps`; a task that no rule cuts is one step."""
    clauses = [clause for sentence in _SENTENCE.split(task) if sentence for clause in _clauses(one_line(sentence))]
    steps = [clause for clause in clauses if _ACTS.search(clause)] or [one_line(task)]
    return Draft(tuple(dict.fromkeys(steps))[:max_steps])


def _clauses(sentence: str) -> list[str]:
    """The clauses of one sentence, in the order in which they are done."""
    plain = _OPENING.sub("", sentence)
    for pattern, order in ((_AFTER, (0, 1)), (_BEFORE, (1, 0))):
        if found := pattern.match(plain):
            parts = found.groups()
            # "after X, Y" and "Y after X": X is done first.
            pair = parts[:2] if parts[0] else parts[:1:-1]
            return [clause for place in order for clause in _clauses(pair[place] or "")]
    parts = [_OPENING.sub("", part).strip(" ,;:.!?，。") for part in _ORDER.split(plain)]
    return [part for part in parts if len(part) > 1]
