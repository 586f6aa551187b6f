"""What data/synthesis/skill_phrases.py knows of English and Chinese instructions: patterns and word lists, no code.

Fitted by reading bodies of public skills; a wrong guess costs a clumsy request, never a wrong judgement.
"""

import re

# Section headings by what their lines are worth in a request. `AGAINST` lists what the skill is *not* for.
AGAINST = re.compile(
    r"\bnot\b|n't|anti-?pattern|pitfall|mistake|gotcha|trigger guidance|boundar|related|limitation"
    r"|不适用|不要|不应|反模式|陷阱|错误|限制|边界|相关技能", re.I)  # fmt: skip
FOR = re.compile(
    r"when|use case|trigger|purpose|what (it|this)|problem|goal|scenario|overview|capabilit|feature|description"
    r"|example (prompt|request|quer|inter)"
    r"|场景|何时|触发|功能|用途|目的|目标|概述|能力|描述|特性|问题|示例请求", re.I)  # fmt: skip
ASIDE = re.compile(
    r"install|setup|set up|prereq|source|referenc|resource|licen|link|credit|changelog|version|auth|environment"
    r"|depend"
    r"|troubleshoot|rate limit|configur|file|script|document|see also|support|contribut|tags|test case|output"
    r"|parameter"
    r"|response|memory|identity|communication|philosophy|your |error|pricing|requirement|note|checklist|success"
    r"|base url"
    r"|step \d|assumption|validation|metric|table of|quick start|getting started|tool discovery|security|constant"
    r"|安装|设置|先决|前提|前置|来源|参考|资源|许可|链接|致谢|日志|版本|认证|环境|依赖|故障|速率|配置|文件|脚本"
    r"|文档|参数|响应"
    r"|输出|注意|安全|要求|目录|常见问题|更新|提示|快速|规则|原则|命令", re.I)  # fmt: skip

UNFIT = re.compile(
    r"https?:|www\.|\./|[{}<>$\\|=`#~^\[\]…]|\.\.\.|--|::|->|→|\w/[\w.-]+/|(?:^|\s)[./~@]\w|\w\(|\w_\w|_\w+\b"
    r"|\b\w+\.(md|py|js|ts|sh|json|ya?ml|toml|txt)\b"
    r"|\b(?:skills?|claude|open ?claw|clawd(?:bot|hub)?|claw ?hub|molt\w*|sub-?agents?|agents?|llms?|rube"
    r"|composio|codex|anthropic|assistant)\b"
    r"|upstream|extracted|\b(?:above|below|following|here|see|refer|http)\b|\[?explicit\]?|pip |npm |git clone"
    r"|api.?key|curl"
    r"|技能|代理|智能体|助手|下面|如下|以下|上述|参见|请参|参考|详见|本文|安装", re.I)  # fmt: skip
MARKUP = (
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"<[^>\n]{1,80}>"), ""),
    (
        re.compile(r"`([^`\n]*)`"),
        lambda code: code[1] if re.fullmatch(r"[A-Za-z][\w.+-]*(?: [\w.+-]+){0,3}", code[1]) else "`",
    ),
    (re.compile(r"\*{1,3}|(?<!\w)_{1,3}(?=\w)|(?<=\w)_{1,3}(?!\w)"), " "),
    (re.compile(r"\s+"), " "),
)
LABEL = re.compile(r"^(.{2,40}?)\s?(?::|：| [-–—] |——)\s*(.+)$")

_VERB_LIST = """
accept access achieve adapt add address adjust aggregate align allocate analyse analyze annotate answer append
apply archive arrange assemble assess assign attach audit augment authenticate author automate back balance
batch benchmark block book boost break bring browse build bundle buy calculate calibrate call cancel capture
catch categorize change check choose cite clarify classify clean clear clone close cluster collect combine
compare compile compose compress compute configure confirm connect consolidate construct control convert
coordinate copy correct count cover crawl create crop cross-check customize cut debug decide decode decompose
decrypt deduplicate define delete deliver deploy describe design detect determine develop diagnose diff discover
display distribute document download draft draw edit eliminate embed emit enable encode encrypt enforce enhance
enrich ensure enumerate escape establish estimate evaluate examine execute expand explain explore export expose
extend extract fetch fill filter find fine-tune fix flag follow forecast format formulate gather generate get
give group guide handle help hide highlight host identify implement import improve include increase index infer
ingest initialize inject insert inspect install integrate interpret invest investigate invite isolate join keep
label launch learn leave limit link list listen load locate lock log look lookup maintain make manage map mark
match measure merge migrate minimize mock model modify monitor mount move name navigate normalize notify open
optimize orchestrate order organize outline override package parse pay perform pick place plan play plot post
predict prepare present preserve prevent preview print prioritize process produce profile project promote
propose protect prototype prove provide provision publish pull purchase push quantify query quote rank read
rebuild recommend reconcile record recover redact reduce refactor refine refresh register release remove rename
render reorganize repair replace replicate reply report reproduce request research reserve reset resize resolve
respond restart restore restructure retrieve reuse review revise rewrite roll rotate route run sample sanitize
save scaffold scan schedule score scrape search secure segment select sell send separate serve set share ship
show shrink simplify simulate sketch solve sort specify split standardize start stop store stream structure
study submit subscribe suggest summarise summarize surface survey swap switch sync synchronize synthesize tag
tailor teach test trace track trade train transcribe transfer transform translate transmit triage trigger
troubleshoot tune understand unify unlock update upgrade upload use validate verify view visualize watch work
wrap write
"""
VERBS = frozenset(_VERB_LIST.split())
ZH_VERBS = re.compile(
    r"^(?:自动|快速|批量|实时|一键|定期|智能|安全地?|高效地?|直接|手动|重新|并|再)*(?:分析|生成|创建|管理|查询"
    r"|搜索|检索|提取|转换|翻译|发送|发布|监控|跟踪|追踪|检测|检查|评估|优化|设计|编写|撰写|"
    r"整理|总结|汇总|计算|比较|对比|查找|查看|获取|读取|下载|上传|导入|导出|处理|识别|构建|搭建|部署|配置|更新"
    r"|删除|添加|修改|修复|调试|测试|验证|审查|审计|规划|制定|安排|预订|预测|推荐|记录|存储|保存|"
    r"备份|恢复|同步|合并|拆分|压缩|解析|抓取|爬取|收集|列出|展示|显示|绘制|可视化|制作|编辑|控制|播放|连接|集成"
    r"|订阅|通知|提醒|回复|润色|改写|扫描|诊断|排查|学习|研究|了解|建立|实现|执行|运行|开发|重构|迁移|"
    r"筛选|过滤|排序|分类|标注|归档|估算|核对|浏览|购买|出售|交易|选择|确定|定义|输出|启动|停止|调用|改进|提高"
    r"|降低|减少|调整|匹配|渲染|裁剪|录制|转录|朗读|解释|解决|写|画|查|找|做)"
)  # fmt: skip

SELF = re.compile(
    r"^(?:this|the|it|a|an)?\s*(?:comprehensive |complete |simple |expert |production-ready )?"
    r"(?:tool|plugin|module|workflow|guide|integration|extension|package|library|framework|command|script|service"
    r"|server|app|reference|pattern|page|api|it|this)\s+"
    r"(?:will |can |also |automatically |is designed to |is used to |helps? (?:you |users |teams |me )?(?:to )?"
    r"|enables? (?:you |users )?(?:to )?|allows? (?:you |users )?(?:to )?|lets (?:you |users )?|covers |provides "
    r"|supports |handles )*",
    re.I,
)  # fmt: skip
WANTS = re.compile(
    r"^(?:use [^,.]{0,60}?(?=when|whenever|if\b|as\b))?(?:(?:when|whenever|if|for|as|use when|use if"
    r"|activate when|you should use this (?:if|when))\s+)?"
    r"(?:the |a |your |my )?(?:user|users|you|someone|i|people|teams?|developers?|customers?|clients?|we)(?:'re"
    r"| are| is)?\s+"
    r"(?:explicitly |also |just |often |currently )?"
    r"(?:wants?|needs?|asks?|asking|asked|requests?|would like|wish(?:es)?|looking|trying|plans?|must|says?"
    r"|mentions?|describes?|has|have|about)\b\s*"
    r"(?:(?:you|me|us|to|for|about|help|with|how|either|questions|a question)\b\s*)*",
    re.I,
)  # fmt: skip
WHEN = re.compile(
    r"^(?:use (?:this |it )?(?:when|for|to|if)|ideal for|good for|best for|perfect for|useful for|used for"
    r"|suitable for|when|for|to|how to)\s+",
    re.I,
)  # fmt: skip
ZH_SELF = re.compile(
    r"^(?:(?:本|该|此|这个|这款|这项|这是一个)(?:工具|插件|模块|脚本|程序|系统|服务|指南|功能|平台|项目|应用)?)?"
    r"(?:的?(?:主要)?(?:功能|目的|作用)是|可以|能够|可|能|会|用于|旨在|主要|帮助(?:您|你|用户|我)?|支持|提供"
    r"|允许(?:您|你|用户)?|使(?:您|你|用户)能够|让(?:您|你|用户)|专门)*"
)  # fmt: skip
ZH_WANTS = re.compile(
    r"^(?:当|如果|若|每当|在)?(?:用户|您|你|有人|客户)?(?:明确)?(?:需要|想要|希望|要求|请求|询问|问|说|提到|想"
    r"|输入)(?:您|你|进行|对|了解|关于)?[:：]?"
)
ZH_TAIL = re.compile(r"(?:的时候|的场景|时使用|时触发|时激活|时|等)$")
FINITE = re.compile(
    r"\b(?:is|are|was|were|has|have|had|can|cannot|can't|will|would|must|should|may|does|do|doesn't|don't|needs?"
    r"|requires?"
    r"|uses?|means|makes?|takes?|gives?|becomes?|contains?|includes?|causes?|fails?|works?|runs?|comes?|allows?"
    r"|supports?|\w{4,}ed)\b", re.I)  # fmt: skip


# The agent that reads the skill is the one who asks here, so it becomes the user, and the skill a tool.
ROLES = (
    (re.compile(r"\b(?:the|an|a|your) (?:ai |coding |llm )?agent\b", re.I), "the user"),
    (re.compile(r"\b(?:this|the) skill\b", re.I), "this tool"),
    (re.compile(r"[本该此](?:技能|工具)|这个?(?:技能|工具)"), "该工具"),
)
QUOTED = re.compile(r"[\"“「]([^\"“”「」]{6,200})[\"”」]")
# Words that point at another line of the body, or speak of its own order.
VAGUE = re.compile(
    r"\b(?:this|these|those|it|them|if needed|as needed|only|step \d|phase|first|default)\b|该|此|这|步骤|第.步|默认",
    re.I,
)
NO_TOPIC = re.compile(
    r"(?:always|never|with|without|before|after|via|by|in|on|at|from|into|through|as|is|are|has|have|can|must"
    r"|should|may|was|each|every"
    r"|any|some|all|most|one|two|i|we|they|he|she|you|prefer|optionally|automatically|only|just|per|than|that"
    r"|which|who|where|how|what|why|yes|see|ok|none"
    r"|n/a|tbd|good|bad|important|tips?|best practices|step|phase|option|example|usage|basic|advanced|critical"
    r"|common|key|core|quick|requires?|using the)\b", re.I)  # fmt: skip
# A line that opens so is a condition or a warning; one that ends so is cut off; a verb before these is a noun.
NOT_ASKED = re.compile(
    r"(?:if|unless|otherwise|note|example|e\.g|i\.e|do not|don't|never|not|no|only|and|or|but|then|also|both|default"
    r"|optional)\b", re.I)  # fmt: skip
OPEN_END = re.compile(r"\b(?:when|where|with|from|for|to|and|or|the|a|of|by|in|on|as|like)[. ]*$", re.I)
NOUN_BEFORE = re.compile(r"(?:is|are|and|or|of|as|for|must|should|not|cannot|can)$", re.I)
ZH_NOT_ASKED = re.compile(
    r"不|如果|若|除非|例如|注意|仅|只|切勿|禁止|严禁|绝不|避免|请勿|默认|可选|否则|如有|如需|联系"
)
ZH_NOUN = re.compile(r"[的器者后时中前率性度]|结果|方式|方法|选项|功能|类型|说明")
# Who reads the body is told `you`; who writes the request says `I`.
_DOES = (
    "can|need|want|have|must|should|will|may|get|use|do|know|"
    "could|might|already|just|really|like|are|did|run|see|find|work|choose"
)
FROM_USER = tuple((re.compile(pattern), said) for pattern, said in (
    (r"\b(?:the |a )?users?(?:'s|’s|s')|\byour\b|\bYour\b", "my"),
    (r"\b[Yy]ours\b", "mine"),
    (r"\b[Yy]ourself\b", "myself"),
    (r"\b(?:[Yy]ou|[Tt]he user|[Uu]ser)(?:'re| are| is)\b", "I am"),
    (r"\b(?:[Tt]he |a )?[Uu]ser has\b", "I have"),
    (rf"\b(?:[Yy]ou|[Tt]he user)(?=(?:'ve|'ll|'d)? (?:{_DOES})\b)", "I"),
    (r"\b[Tt]he user (want|need|ask|request|provide|specifie)s\b", r"I \1"),
    (r"\bthe user\b", "me"),
    (r"(?:^|(?<=[.,] ))[Yy]ou\b", "I"),
    (r"\byou\b", "me"),
))  # fmt: skip
ZH_FROM_USER = (
    (re.compile(r"(?:用户|您|你|客户)的"), "我的"),
    (re.compile(r"^用户|(?<=[帮让为向与给供使由问])用户|您|你"), "我"),
    (re.compile(r"我我"), "我"),
    (re.compile(r"我们?们"), "我们"),
)
