"""What engines behind an HTTP server share: the process, the event stream, the weights."""
