"""Interfaces of a run for other tools: metrics for Prometheus, spans for OpenTelemetry, traces for Perfetto."""
