"""HTTP: parsing of requests and bodies, message heads, errors, connection limits."""
