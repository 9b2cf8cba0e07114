"""Who may ask, for how much and when: keys, tenants, limits, turns, deadlines."""
