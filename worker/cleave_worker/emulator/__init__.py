"""An engine without a model: has vLLM's API, and a latency model for its timing."""
