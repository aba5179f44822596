"""What is wrong with nodes before anything is started on them: `corral doctor`, and the quick part that `up` runs.

Looks only; changes nothing, ends no process, and finishes in its time even when nodes hang.
"""

from corral.doctor.examination import Question, examine, quick_check
from corral.doctor.finding import Finding, Level, Pair, Report

__all__ = ["Finding", "Level", "Pair", "Question", "Report", "examine", "quick_check"]
