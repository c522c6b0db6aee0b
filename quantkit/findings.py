"""What a verification can find: stable codes, how bad each is, and what to do about it.

QK1xx files and manifest, QK2xx tensors, QK3xx configuration, QK4xx tokenizer and settings, QK5xx a short run, QK6xx gates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Rule(NamedTuple):
    """What a code means. level: error, warning or note; advice: what to do."""

    level: str
    title: str
    advice: str


AGAIN = "Copy or download the artifact again, or make it again."
RULES = {
    "QK101": Rule("error", "a file is missing", AGAIN),
    "QK102": Rule("error", "a file is not what was written", AGAIN),
    "QK103": Rule("error", "a weight file that does not belong here", "Remove it: some loaders read every weight file of a folder."),
    "QK104": Rule("note", "there is no manifest", "Only what contradicts itself can be found. Artifacts of quantkit have quantkit.json."),
    "QK105": Rule("error", "the manifest cannot be read", AGAIN),
    "QK106": Rule("note", "a page was edited", "It changes no output."),
    "QK107": Rule("note", "a piece of a split file", "The pieces are compared with the manifest; put them together to run them."),
    "QK108": Rule("note", "a remark of the reader", "See whether it is meant so."),
    "QK201": Rule("error", "a tensor is missing", AGAIN),
    "QK202": Rule("error", "a tensor that nobody planned", AGAIN),
    "QK203": Rule("error", "a tensor has another dtype or shape than planned", AGAIN),
    "QK204": Rule("error", "a tensor's bytes are not those that were written", AGAIN),
    "QK205": Rule("error", "a tensor holds NaN or Inf", "Make the artifact again from an undamaged source."),
    "QK206": Rule("error", "scales that cannot be right", "Make the artifact again; a scale is wrong by orders of magnitude, or zero."),
    "QK207": Rule("error", "codes do not read back as the solver chose them", "Packing, zero points or configuration changed. " + AGAIN),
    "QK208": Rule("warning", "a weight is zero everywhere", "Its module gives nothing: see whether the source's is zero too."),
    "QK209": Rule("warning", "a few weights are far larger than the rest", "The source is so; see whether that is known of the model."),
    "QK301": Rule("error", "the artifact does not open", "See the reason; " + AGAIN.lower()),
    "QK302": Rule("error", "transformers refuses the configuration", "Compare config.json with the source's."),
    "QK303": Rule("error", "the configuration contradicts the tensors", "Runtimes believe config.json: it must say what the tensors are."),
    "QK304": Rule("warning", "runtimes fuse these weights and refuse what does not agree", "Give them one scheme, or exclude them all."),
    "QK401": Rule("error", "the tokenizer does not load", "Copy the tokenizer's files from the source."),
    "QK402": Rule("error", "the tokenizer gives other ids than the source's", "Copy the tokenizer's files from the source."),
    "QK403": Rule("error", "the chat template does not render", "Copy the template from the source, or mend it."),
    "QK404": Rule("warning", "transformers refuses to save these generation settings", "They load; mend generation_config.json."),
    "QK501": Rule("error", "the output is not finite", "Measure the source: if it is finite, make the artifact again."),
    "QK502": Rule("warning", "the output does not depend on the input", "Ask `quantkit generate` for a text, and compare with the source."),
    "QK503": Rule("warning", "float16 overflows", "Serve it in bfloat16 (vLLM: --dtype bfloat16)."),
    "QK601": Rule("gate", "a quality gate was missed", "Quantize with more bits or data, or another method."),
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing: a code of RULES, the place, and what was found there."""

    code: str
    where: str
    text: str

    @property
    def level(self) -> str:
        """error, warning, gate or note."""
        return RULES[self.code].level

    def line(self) -> str:
        """Return the finding as one line."""
        rule = RULES[self.code]
        return f"{self.code} {rule.title}: {self.where}{': ' if self.text else ''}{self.text}. {rule.advice}"


@dataclass
class Verdict:
    """What was looked at, check by check, and what was found. counts: how many files, tensors and modules were compared."""

    checks: dict[str, list[Finding]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        """All findings, in the order of the checks."""
        return [finding for found in self.checks.values() for finding in found]

    def of(self, level: str) -> list[Finding]:
        """Return the findings of a level."""
        return [finding for finding in self.findings if finding.level == level]
