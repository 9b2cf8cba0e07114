"""What becomes of a request whose engine was lost: again elsewhere, or the rest of its stream."""
