"""Where problems come from, and the order in which a run draws them."""

from spiral_fast.problems.draws import Draws
from spiral_fast.problems.load import ProblemSets, load_problems

__all__ = ["Draws", "ProblemSets", "load_problems"]
