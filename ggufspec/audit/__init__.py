"""Tests whether speculative text has the distribution of the target alone."""

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
