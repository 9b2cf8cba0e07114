"""The cleave command."""
