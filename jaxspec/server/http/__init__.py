"""HTTP layer: server, connections, errors, server-sent events, API keys and request ids."""
