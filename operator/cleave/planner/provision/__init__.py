"""Which machines to buy or rent for a rate or a budget (Splitwise)."""
