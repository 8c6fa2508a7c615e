"""A network with set latency and bandwidth between worker processes of one Linux machine."""
