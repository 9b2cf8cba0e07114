"""Measures a running engine through its OpenAI API and writes a profile of its speed."""
