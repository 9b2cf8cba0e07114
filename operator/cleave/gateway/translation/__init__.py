"""Other APIs for clients, translated into chat completions and back."""
