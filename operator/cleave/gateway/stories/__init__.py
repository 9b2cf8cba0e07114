"""What is told of single requests: a line in the access log, spans of a trace."""
