"""The planner's answer as one page of HTML that needs nothing else."""
