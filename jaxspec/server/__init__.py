"""HTTP server with OpenAI's and Anthropic's APIs, streamed as server-sent events.

It needs the extra `server`. `app.make_app` builds the app around an `AsyncLLM`.
"""
