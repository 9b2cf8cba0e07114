"""Pictures of the dashboards in docs/pictures: a fleet with traffic, a Prometheus, a browser."""
