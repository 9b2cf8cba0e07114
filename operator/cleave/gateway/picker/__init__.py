"""The endpoint picker: Envoy asks over gRPC where a request shall go."""
