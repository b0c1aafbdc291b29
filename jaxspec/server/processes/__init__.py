"""API processes: HTTP, templates, tokens and texts in processes beside the engine's.

    clients   API process 1    RemoteLLM  \
    clients   API process 2    RemoteLLM  --  Channel  --  Desk of each  --  AsyncLLM, the engine
    clients   API process 3    RemoteLLM  /

Requests cross as checked samples, and what comes for them as tokens, once a step.
"""
