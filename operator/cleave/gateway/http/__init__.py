"""HTTP as the gateway reads and writes it: requests, bodies, heads, errors, open connections."""
