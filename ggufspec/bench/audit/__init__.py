"""Tests whether speculative text has the distribution of the target alone."""

from ggufspec.bench.audit.report import AuditOptions, AuditReport
from ggufspec.bench.audit.run import PROMPTS, audit

__all__ = ["PROMPTS", "AuditOptions", "AuditReport", "audit"]
