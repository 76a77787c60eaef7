"""Tests whether speculative text has the distribution of the target alone.

import ggufspec
from ggufspec.audit import AuditOptions, audit

with ggufspec.load("large.gguf", "small.gguf") as engine:
    report = audit(engine, ["Once upon a time"], AuditOptions(n_runs=200))
    print(report.verdict)
"""

from ggufspec.audit.prompts import PROMPTS
from ggufspec.audit.report import (
    AuditOptions,
    AuditReport,
    BatchDistributions,
    Divergence,
    Greedy,
    RuleDistributions,
    Sequences,
)
from ggufspec.audit.run import audit
from ggufspec.audit.statistics import Test

__all__ = [
    "PROMPTS",
    "AuditOptions",
    "AuditReport",
    "BatchDistributions",
    "Divergence",
    "Greedy",
    "RuleDistributions",
    "Sequences",
    "Test",
    "audit",
]
