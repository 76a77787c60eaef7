"""Is speculative text what the target alone would write? Asks it of any engine's own pair.

from ggufspec.audit import AuditOptions, audit

with ggufspec.load("large.gguf", "small.gguf") as engine:
    report = audit(engine, ["Once upon a time"], AuditOptions(n_runs=200))
    print(report.verdict)
"""

from ggufspec.audit.prompts import PROMPTS
from ggufspec.audit.report import (
    AuditOptions,
    AuditReport,
    BatchLaws,
    Greedy,
    Parting,
    RuleLaws,
    Sequences,
)
from ggufspec.audit.run import audit
from ggufspec.audit.statistics import Test

__all__ = [
    "PROMPTS",
    "AuditOptions",
    "AuditReport",
    "BatchLaws",
    "Greedy",
    "Parting",
    "RuleLaws",
    "Sequences",
    "Test",
    "audit",
]
