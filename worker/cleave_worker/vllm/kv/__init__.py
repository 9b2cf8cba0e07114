"""Cleave's KV connector for vLLM: hand-offs that are checked before anything is attended to."""
