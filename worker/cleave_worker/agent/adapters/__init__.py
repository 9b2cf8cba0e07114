"""The LoRA adapters that a running engine loads and unloads."""
