"""Records of single requests: the access log and OpenTelemetry traces."""
