"""Tests whether speculative text has the distribution of the target alone."""

from ggufspec.audit.report import AuditOptions, AuditReport
from ggufspec.audit.run import PROMPTS, audit

__all__ = ["PROMPTS", "AuditOptions", "AuditReport", "audit"]
