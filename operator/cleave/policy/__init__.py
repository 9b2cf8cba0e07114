"""Scheduling decisions as pure functions, shared by router, engines and simulator."""
