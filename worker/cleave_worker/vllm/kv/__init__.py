"""Cleave's KV connector for vLLM: handoffs are verified before an engine uses their KV."""
