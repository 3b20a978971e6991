"""What a run shows to tools outside it: metrics for Prometheus, spans for OpenTelemetry, traces for Perfetto."""
