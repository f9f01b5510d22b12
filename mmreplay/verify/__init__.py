"""Every claim that a buffer's files make, checked; nothing is ever changed."""

from mmreplay.verify.check import is_buffer, verify_buffer
from mmreplay.verify.report import Finding, VerifyReport

__all__ = ["Finding", "VerifyReport", "is_buffer", "verify_buffer"]
