"""The HTTP server: OpenAI's and Anthropic's requests in, answers and server-sent events out.

It needs the extra `server`. `app.make_app` joins its parts around an `AsyncLLM`.
"""
