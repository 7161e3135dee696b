"""`rolloutmq bench scale`: a day of 1,000 simulated workers on a real broker, and real workers that die at once."""

from .bench import ScalePlan, run_scale_bench
from .deaths import Deaths
from .scenario import Scenario, read_scenario

__all__ = ["Deaths", "ScalePlan", "Scenario", "read_scenario", "run_scale_bench"]
