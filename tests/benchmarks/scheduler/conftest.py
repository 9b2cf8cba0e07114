"""The benchmark is a folder of scripts, not a package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "scheduler"))
