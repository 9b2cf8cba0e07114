"""What engines are told about order and admission, and how they follow it."""
