"""Every claim that a buffer's files make, checked; nothing is ever changed."""

from mmreplay.verify.check import verify_buffer
from mmreplay.verify.report import Finding, VerifyReport

__all__ = ["Finding", "VerifyReport", "verify_buffer"]
