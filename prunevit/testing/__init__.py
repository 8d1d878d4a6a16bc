"""For authors of policies: the checks that every policy must pass, and the comparison with another implementation."""

from prunevit.testing.candidate import Candidate, CheckFailure, NotApplicable
from prunevit.testing.divergence import Divergence, compare
from prunevit.testing.kit import Result, check_policy, checks

__all__ = [
    "Candidate",
    "CheckFailure",
    "Divergence",
    "NotApplicable",
    "Result",
    "check_policy",
    "checks",
    "compare",
]
