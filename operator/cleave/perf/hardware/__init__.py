"""GPUs, links and memory of machines, and KV transfer between them."""
