"""SmolLM2-135M-Instruct from PyPI: the model of `cleave demo` and of examples/real.yaml."""
