"""Engines in other processes: messages, requests and replicas.

    EngineClient -- Channel -- RemoteEngineServer -- AsyncLLM

The two sides run in two processes. An API process of the server is a client of the process with the
`AsyncLLM`. With `data_parallel_size`, that process is a client of one process per replica:

    LLM or AsyncLLM -- ReplicaGroup --+-- EngineClient -- Channel -- replica process 1
                                      +-- EngineClient -- Channel -- replica process 2

Requests are sent as validated samples. Tokens are sent back once per step, and decoded to text
where the request was made.
"""
