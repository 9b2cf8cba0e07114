"""How many workers a plan needs at other rates (Aladdin)."""
