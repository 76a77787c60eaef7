"""Models, contexts and sessions of llama.cpp. The only package that imports llama_cpp.

Importing one of its modules loads libllama.
"""
