"""What happens when an engine fails: retries on other instances, streams continued by another."""
