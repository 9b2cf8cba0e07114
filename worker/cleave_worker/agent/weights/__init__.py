"""What an engine loads: where it comes from, and a fingerprint of its content."""
