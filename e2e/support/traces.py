"""Requests of a client that traces them."""

PROMPT = "MARKER-PROMPT and some more words"
CLIENT = 0xC11E47
TRACEPARENT = f"00-{0xABCDEF:032x}-{CLIENT:016x}-01"
