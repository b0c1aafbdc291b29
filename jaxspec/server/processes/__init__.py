"""API processes: HTTP, chat templates and tokenization in processes beside the engine's.

clients -- API process 1: RemoteLLM -- Channel -- RemoteEngineServer 1 --+
clients -- API process 2: RemoteLLM -- Channel -- RemoteEngineServer 2 --+-- AsyncLLM
clients -- API process 3: RemoteLLM -- Channel -- RemoteEngineServer 3 --+
"""
