"""The router: watches the agents and picks the instances of each request."""
