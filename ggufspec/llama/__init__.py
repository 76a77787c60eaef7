"""llama.cpp behind a door: models and contexts in, sessions out. The only importer of llama_cpp.

Importing a module of this room loads libllama; nothing else in ggufspec does.
"""
