"""A judge: programs scored on hidden tests, in fresh sandboxes."""

from .options import JudgeOptions
from .service import JudgeService
from .tool import JudgeTool
from .verdicts import Rule, Verdict, judge_outcome

__all__ = ["JudgeOptions", "JudgeService", "JudgeTool", "Rule", "Verdict", "judge_outcome"]
