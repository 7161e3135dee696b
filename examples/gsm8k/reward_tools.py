"""Tools that score, in VERL's form: tools.yaml names them, `ToolRegistry.load` makes them.

A call's instance is created with `create_kwargs: {ground_truth: …}`. `execute` returns the reward of the step: 0, or
the penalty if the score is no better than before. `calc_reward` returns the score, 1.0 if the answer is right, or 0.0.
"""

import asyncio
import math
import re
from decimal import Decimal

from rolloutmq.producer.episodes import Calculator, Search

LONGEST, MOST = 500, 8
"""Characters of an answer, and queries of a search, that count."""
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
UNIT = re.compile(r"(?<=[\d)])\s*((square|sq|cubic|units?|[cmk]?m|in|ft|inches|feet|degrees?)\b\s*)+(\*\*\([23]\))?$")
REWRITES = (  # until nothing changes, so that the innermost braces go first
    (r"\\(?:left|right|[,!;])|\\?\$|\^\{?\\circ\}?|\\degree|°", ""),
    (r"\s*([{}])\s*", r"\1"),
    (r"(?<=\d),(?=\d{3}\b)", ""),
    (r"\\(?:text|mathrm)\{([^{}]*)\}", r" \1"),
    (r"(?s).*\\boxed\{([^{}]*)\}.*", r"\1"),
    (r"\\[dt]frac", r"\\frac"),
    (r"(\d)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+(\2)/(\3))"),
    (r"\\sqrt\s+(?=\d)", r"\\sqrt"),
    ("\u2212", "-"),
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))"),
    (r"\\frac(\d)(\d)", r"((\1)/(\2))"),
    (r"\\sqrt\[(\d+)\]\{([^{}]*)\}", r"((\2)**(1/\1))"),
    (r"\\sqrt(?:\{([^{}]*)\}|(\d))", r"sqrt(\1\2)"),
    (r"√\(?(\d+)\)?", r"sqrt(\1)"),
    (r"\^(?:\{([^{}]*)\}|(\d))", r"**(\1\2)"),
    (r"\\pi|π", "pi"),
    (r"\\(?:cdot|times)|×", "*"),
    (r"(?<=[\d)])\s*(?=pi|sqrt|\()|(?<=pi)\s*(?=sqrt|\()|(?<=\))(?=\d)", "*"),
)


class Scored:
    """config: `penalty`, by default -0.05."""

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.truths, self.scores = {}, {}

    async def create(self, instance_id, create_kwargs=None, **_):
        self.truths[instance_id] = str((create_kwargs or {}).get("ground_truth", ""))
        self.scores[instance_id] = 0.0
        return instance_id, None

    async def execute(self, instance_id, parameters, **_):
        said, before = str(parameters.get("answer", ""))[-LONGEST:], self.scores[instance_id]
        score = self.scores[instance_id] = float(await self.right(said, self.truths[instance_id]))
        reward = 0.0 if score > before else self.config.get("penalty", -0.05)
        return f"{said} is {'right' if score else 'wrong'}.", reward, {"score": score}

    async def calc_reward(self, instance_id, **_):
        return self.scores[instance_id]

    async def release(self, instance_id, **_):
        self.truths.pop(instance_id, None)
        self.scores.pop(instance_id, None)


def last_number(text):
    """The last number of a text, or None: of "#### $1,800.00" it is 1800."""
    found = NUMBER.findall(text.replace("\u2212", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


class Gsm8kTool(Scored):
    """Takes `answer`: its last number counts."""

    async def right(self, said, truth):
        return (number := last_number(said)) is not None and number == last_number(truth)


def plain(latex):
    r"""LaTeX as the calculator reads it: \boxed{x = 2\sqrt{3} \text{ cm}} is 2*sqrt(3)."""
    before, text = None, latex.strip(" .")
    while text != before:
        before = text
        for pattern, instead in REWRITES:
            text = re.sub(pattern, instead, text)
    return UNIT.sub("", text.rpartition("=")[2].strip()).strip()


class Geo3kTool(Scored):
    """Takes `answer`: a number counts by its value, anything else by its letters. config: `tolerance`, 0.001."""

    async def right(self, said, truth):
        one, other = plain(said), plain(truth)
        try:
            values = [float(await Calculator()(text)) for text in (one, other)]
        except ValueError:
            return one != "" and one.lower().split() == other.lower().split()
        return math.isclose(*values, rel_tol=self.config.get("tolerance", 0.001))


class SearchTool(Scored):
    """Takes `query_list`. Right if a result has the truth in it. config: `documents`, (title, text) each; `topk`, 3."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.search = Search(config["documents"])

    async def execute(self, instance_id, parameters, **_):
        topk = self.config.get("topk", 3)
        asked, truth = parameters["query_list"], self.truths[instance_id].lower()
        queries = [asked] if isinstance(asked, str) else asked[:MOST]
        found = [await asyncio.to_thread(self.search, query, topk) for query in queries]
        self.scores[instance_id] = float(truth != "" and any(truth in text.lower() for text in found))
        return "\n\n".join(found), 0.0, {"query_count": len(found)}
