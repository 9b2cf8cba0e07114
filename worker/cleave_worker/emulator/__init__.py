"""An engine without a model: speaks like vLLM, timed by a latency model."""
