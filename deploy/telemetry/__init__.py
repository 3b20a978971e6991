"""What a run tells monitors: metrics of each role for Prometheus, spans of episodes for OpenTelemetry."""
