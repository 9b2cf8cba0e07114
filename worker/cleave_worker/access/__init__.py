"""Configuration of order and admission in engines, and the logic that applies it."""
